//! Element types in the words of a kernel's text: how an element is stored, what it is while it is computed with, and how
//! one becomes the other.

use compiler::tensor::DType;

/// The type of an element in memory: those of a kernel's text are called as ours are. Truth is a byte.
pub fn stored(dtype: DType) -> &'static str {
    if dtype == DType::Bool { DType::U8.name() } else { dtype.name() }
}

/// The type that holds an element while it is computed with: floats narrower than `f32` as `f32`, whole numbers as `i64`
/// (the widest without a sign as `u64`), truth as `bool`.
pub fn held(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "f64",
        DType::F32 | DType::F16 | DType::Bf16 => "f32",
        DType::U64 => "u64",
        DType::Bool => "bool",
        _ => "i64",
    }
}

/// The element type of sums and of what is kept between launches: `f64` for `f64`, else `f32`.
pub fn accumulator(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// A type of whole numbers as large as the element, to move its bits.
pub fn bits(dtype: DType) -> DType {
    match dtype.size() {
        1 => DType::U8,
        2 => DType::U16,
        4 => DType::U32,
        _ => DType::U64,
    }
}

/// A stored element as it is held.
pub fn load(dtype: DType, element: &str) -> String {
    match dtype {
        DType::F64 | DType::F32 | DType::I64 | DType::U64 => element.to_string(),
        DType::F16 | DType::Bf16 => format!("wide({element})"),
        DType::Bool => format!("({element} != 0)"),
        _ => format!("(i64){element}"),
    }
}

/// A held value as it is stored; a float may be held wider than [`held`] says.
pub fn store(dtype: DType, value: &str) -> String {
    match dtype {
        DType::F16 => format!("narrow_f16({value})"),
        DType::Bf16 => format!("narrow_bf16({value})"),
        DType::Bool => format!("(u8)(({value}) != 0)"),
        _ => format!("({})({value})", stored(dtype)),
    }
}

/// A held value of one type as another one is held, as [`Cast`](compiler::op::Cast) means it.
pub fn cast(from: DType, to: DType, value: &str) -> String {
    match (from.is_float(), to) {
        (true, DType::F64) => format!("(f64)({value})"),
        (true, to) if to.is_float() => value.to_string(),
        (true, DType::U64) => format!("whole_u64((f64)({value}))"),
        (true, DType::Bool) => format!("(({value}) != 0)"),
        (true, _) => format!("whole((f64)({value}))"),
        // Through f64, as the reference goes.
        (false, to) if to.is_float() => format!("(f64)({value})"),
        (false, DType::Bool) => format!("(({value}) != 0)"),
        (false, to) => format!("({})({value})", held(to)),
    }
}

/// A number as a literal of the type that holds it.
pub fn literal(dtype: DType, value: f64) -> String {
    let held = held(dtype);
    let text = match value {
        v if v.is_nan() => return format!("({held})__uint_as_float(0x7fc00000u)"),
        f64::INFINITY => return format!("({held})__uint_as_float(0x7f800000u)"),
        f64::NEG_INFINITY => return format!("({held})__uint_as_float(0xff800000u)"),
        v if held == "f32" => format!("{:?}f", v as f32),
        v => format!("{v:?}"),
    };
    // A float's own text may be that of a whole number with an exponent: `1e20` is a float in C as well.
    format!("({held})({text})")
}
