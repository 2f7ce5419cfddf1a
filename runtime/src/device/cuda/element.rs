//! Element types in kernel source: storage type, compute type, and conversions between them.

use compiler::tensor::DType;

/// The storage type; booleans are bytes.
pub fn storage_type(dtype: DType) -> &'static str {
    if dtype == DType::Bool { DType::U8.name() } else { dtype.name() }
}

/// The compute type: `f32` for narrower floats, `i64` for integers (`u64` for `u64`), `bool` for booleans.
pub fn compute_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "f64",
        DType::F32 | DType::F16 | DType::Bf16 => "f32",
        DType::U64 => "u64",
        DType::Bool => "bool",
        _ => "i64",
    }
}

/// The type of sums and intermediates: `f64` for `f64`, else `f32`.
pub fn accumulator(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// An unsigned integer type of equal size, to move bits.
pub fn bits(dtype: DType) -> DType {
    match dtype.size() {
        1 => DType::U8,
        2 => DType::U16,
        4 => DType::U32,
        _ => DType::U64,
    }
}

/// A stored element in its compute type.
pub fn load(dtype: DType, element: &str) -> String {
    match dtype {
        DType::F64 | DType::F32 | DType::I64 | DType::U64 => element.to_string(),
        DType::F16 | DType::Bf16 => format!("wide({element})"),
        DType::Bool => format!("({element} != 0)"),
        _ => format!("(i64){element}"),
    }
}

/// A computed value in its storage type; a float may be wider than [`compute_type`].
pub fn store(dtype: DType, value: &str) -> String {
    match dtype {
        DType::F16 => format!("narrow_f16({value})"),
        DType::Bf16 => format!("narrow_bf16({value})"),
        DType::Bool => format!("(u8)(({value}) != 0)"),
        _ => format!("({})({value})", storage_type(dtype)),
    }
}

/// A value converted between compute types, with the semantics of [`Cast`](compiler::op::Cast).
pub fn cast(from: DType, to: DType, value: &str) -> String {
    match (from.is_float(), to) {
        (true, DType::F64) => format!("(f64)({value})"),
        (true, to) if to.is_float() => value.to_string(),
        (true, DType::U64) => format!("whole_u64((f64)({value}))"),
        (true, DType::Bool) => format!("(({value}) != 0)"),
        (true, _) => format!("whole((f64)({value}))"),
        // Through f64, like the reference.
        (false, to) if to.is_float() => format!("(f64)({value})"),
        (false, DType::Bool) => format!("(({value}) != 0)"),
        (false, to) => format!("({})({value})", compute_type(to)),
    }
}

/// A literal of the compute type.
pub fn literal(dtype: DType, value: f64) -> String {
    let compute_type = compute_type(dtype);
    let text = match value {
        v if v.is_nan() => return format!("({compute_type})__uint_as_float(0x7fc00000u)"),
        f64::INFINITY => return format!("({compute_type})__uint_as_float(0x7f800000u)"),
        f64::NEG_INFINITY => return format!("({compute_type})__uint_as_float(0xff800000u)"),
        v if compute_type == "f32" => format!("{:?}f", v as f32),
        v => format!("{v:?}"),
    };
    // Rust may print a float as an integer with exponent: `1e20` is a float in C++ too.
    format!("({compute_type})({text})")
}
