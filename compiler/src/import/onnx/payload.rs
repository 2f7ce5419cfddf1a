//! Tensor values: converts every ONNX storage form to raw little-endian bytes.
//!
//! A `TensorProto` can store its values in `raw_data`, six typed lists or an external file. [`resolve`] checks them
//! against type and dims and moves them to `raw_data`; [`tensor`] reads them from there.

use bytes::Bytes;

use crate::import::onnx::element::{self, STRING, SizeError};
use crate::import::onnx::external::Files;
use crate::import::onnx::model::{Payload, Tensor};
use crate::import::onnx::proto::TensorProto;
use crate::import::onnx::proto::tensor_proto::{DataLocation, DataType};
use crate::import::onnx::tensor_error::TensorError;

/// Checks `tensor` and moves its values to `raw_data` (strings stay in `string_data`). If its external file does not
/// exist, the tensor keeps its reference to the file.
pub fn resolve(tensor: &mut TensorProto, files: &mut Files) -> Result<(), TensorError> {
    let elem_type = tensor.data_type();
    if !element::known(elem_type) {
        return Err(TensorError::DataType(elem_type));
    }
    if tensor.segment.is_some() {
        return Err(TensorError::Segment);
    }
    let elements = element::elements(&tensor.dims)?;
    let source = source(tensor)?;
    if elem_type == STRING {
        return match source {
            None | Some("string_data") => entries(tensor, elements, tensor.string_data.len(), "string_data"),
            Some(field) => Err(TensorError::WrongField { elem_type, field }),
        };
    }
    // `known` and not a string, so it has a width.
    let bits = element::bits(elem_type).ok_or(TensorError::DataType(elem_type))?;
    let expected = element::bytes(&tensor.dims, bits)?;
    let raw = match source {
        Some("external_data") => match files.read(tensor.name(), &tensor.external_data, expected)? {
            Some(bytes) => bytes,
            None => return Ok(()),
        },
        Some("raw_data") | None => tensor.raw_data.take().unwrap_or_default(),
        Some(field) => typed(tensor, field, elements, bits)?,
    };
    if raw.len() as u64 != expected {
        let source_name = source.unwrap_or("raw_data");
        let (dims, length) = (tensor.dims.clone(), raw.len() as u64);
        return Err(TensorError::Bytes { elem_type, dims, expected, found: length, source_name });
    }
    tensor.float_data = Vec::new();
    tensor.int32_data = Vec::new();
    tensor.int64_data = Vec::new();
    tensor.double_data = Vec::new();
    tensor.uint64_data = Vec::new();
    tensor.external_data = Vec::new();
    tensor.data_location = None;
    tensor.raw_data = Some(raw);
    Ok(())
}

/// Converts a resolved `TensorProto`.
///
/// All tensors of a decoded model are resolved, including those in attributes. For any other tensor the result has only
/// the type, the dims and `raw_data`.
pub fn tensor(tensor: &TensorProto) -> Tensor {
    let payload = if tensor.data_location() == DataLocation::External {
        let location = tensor.external_data.iter().find(|entry| entry.key() == "location");
        Payload::Missing { path: location.map(|entry| entry.value().to_owned()).unwrap_or_default() }
    } else if tensor.data_type() == STRING {
        Payload::Strings(tensor.string_data.clone())
    } else {
        Payload::Bytes(tensor.raw_data.clone().unwrap_or_default())
    };
    Tensor { name: tensor.name().to_owned(), elem_type: tensor.data_type(), dims: tensor.dims.clone(), payload }
}

/// The name of the field that has the values; `None` if there are none.
fn source(tensor: &TensorProto) -> Result<Option<&'static str>, TensorError> {
    let present = [
        ("external_data", tensor.data_location() == DataLocation::External),
        ("raw_data", tensor.raw_data.as_ref().is_some_and(|raw| !raw.is_empty())),
        ("float_data", !tensor.float_data.is_empty()),
        ("int32_data", !tensor.int32_data.is_empty()),
        ("int64_data", !tensor.int64_data.is_empty()),
        ("double_data", !tensor.double_data.is_empty()),
        ("uint64_data", !tensor.uint64_data.is_empty()),
        ("string_data", !tensor.string_data.is_empty()),
    ];
    let mut fields = present.into_iter().filter(|(_, is)| *is).map(|(name, _)| name);
    match (fields.next(), fields.next()) {
        (Some(first), Some(second)) => Err(TensorError::TwoSources { first, second }),
        (first, _) => Ok(first),
    }
}

/// The raw bytes of a typed field. The number of entries is checked first, so the allocation is at most eight times the
/// decoded size.
fn typed(tensor: &TensorProto, field: &'static str, elements: u64, bits: u64) -> Result<Bytes, TensorError> {
    use DataType::*;
    let elem_type = tensor.data_type();
    let kind = DataType::try_from(elem_type).map_err(|_| TensorError::DataType(elem_type))?;
    let error = TensorError::WrongField { elem_type, field };
    // Number of entries of the field. An entry is one element, half of a complex number, or several packed elements.
    let parts = |each: u64| {
        elements
            .checked_mul(each)
            .ok_or_else(|| SizeError::Overflow { dims: tensor.dims.iter().take(8).copied().collect() })
    };
    Ok(match (field, kind) {
        ("float_data", Float | Complex64) => {
            entries(tensor, parts(bits / 32)?, tensor.float_data.len(), field)?;
            tensor.float_data.iter().flat_map(|value| value.to_le_bytes()).collect()
        }
        ("double_data", Double | Complex128) => {
            entries(tensor, parts(bits / 64)?, tensor.double_data.len(), field)?;
            tensor.double_data.iter().flat_map(|value| value.to_le_bytes()).collect()
        }
        ("int64_data", Int64) => {
            entries(tensor, elements, tensor.int64_data.len(), field)?;
            tensor.int64_data.iter().flat_map(|value| value.to_le_bytes()).collect()
        }
        ("uint64_data", Uint64) => {
            entries(tensor, elements, tensor.uint64_data.len(), field)?;
            tensor.uint64_data.iter().flat_map(|value| value.to_le_bytes()).collect()
        }
        ("uint64_data", Uint32) => {
            entries(tensor, elements, tensor.uint64_data.len(), field)?;
            let mut raw = Vec::with_capacity(tensor.uint64_data.len() * 4);
            for (index, &value) in tensor.uint64_data.iter().enumerate() {
                let range = |_| TensorError::Range { elem_type, index, value: value.to_string() };
                raw.extend_from_slice(&u32::try_from(value).map_err(range)?.to_le_bytes());
            }
            raw.into()
        }
        ("int32_data", Float6e2m3 | Float6e3m2) => {
            entries(tensor, elements, tensor.int32_data.len(), field)?;
            six_bits(&tensor.int32_data, elem_type)?
        }
        ("int32_data", Bool) => {
            entries(tensor, elements, tensor.int32_data.len(), field)?;
            tensor.int32_data.iter().map(|value| u8::from(*value != 0)).collect()
        }
        ("int32_data", _) if bits <= 32 && !matches!(kind, Float | Uint32) => {
            let per_entry = (8 / bits).max(1);
            entries(tensor, elements.div_ceil(per_entry), tensor.int32_data.len(), field)?;
            narrow_values(&tensor.int32_data, bits.max(8), elem_type)?
        }
        _ => return Err(error),
    })
}

/// Keeps the low `bits` (8, 16 or 32) of each entry. Exporters disagree on sign or zero extension of negative numbers,
/// so both are accepted; values outside both ranges are refused.
fn narrow_values(values: &[i32], bits: u64, elem_type: i32) -> Result<Bytes, TensorError> {
    let width = bits as usize / 8;
    let (low, high) = (-(1_i64 << (bits - 1)), (1_i64 << bits) - 1);
    let mut raw = Vec::with_capacity(values.len() * width);
    for (index, &value) in values.iter().enumerate() {
        if !(low..=high).contains(&i64::from(value)) {
            return Err(TensorError::Range { elem_type, index, value: value.to_string() });
        }
        raw.extend_from_slice(&value.to_le_bytes()[..width]);
    }
    Ok(raw.into())
}

/// Packs six-bit codes, one per entry, into the `raw_data` format: four codes in three bytes, low bits first.
fn six_bits(values: &[i32], elem_type: i32) -> Result<Bytes, TensorError> {
    let mut raw = vec![0_u8; (values.len() * 6).div_ceil(8)];
    for (index, &value) in values.iter().enumerate() {
        if !(0..64).contains(&value) {
            return Err(TensorError::Range { elem_type, index, value: value.to_string() });
        }
        let (byte, shift) = (index * 6 / 8, index * 6 % 8);
        let code = (value as u16) << shift;
        raw[byte] |= code as u8;
        if shift > 2 {
            raw[byte + 1] |= (code >> 8) as u8;
        }
    }
    Ok(raw.into())
}

fn entries(tensor: &TensorProto, expected: u64, found: usize, field: &'static str) -> Result<(), TensorError> {
    let found = found as u64;
    if found == expected {
        return Ok(());
    }
    Err(TensorError::Entries { elem_type: tensor.data_type(), dims: tensor.dims.clone(), expected, found, field })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode_tensor(
        kind: DataType,
        dims: &[i64],
        fill: impl FnOnce(&mut TensorProto),
    ) -> Result<Vec<u8>, TensorError> {
        let mut proto = TensorProto { dims: dims.to_vec(), data_type: Some(kind as i32), ..Default::default() };
        fill(&mut proto);
        resolve(&mut proto, &mut Files::none())?;
        match tensor(&proto).payload {
            Payload::Bytes(bytes) => Ok(bytes.to_vec()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn typed_fields_pack_as_the_standard_says() {
        use DataType::*;
        assert_eq!(decode_tensor(Float, &[1], |t| t.float_data = vec![1.0]), Ok(vec![0, 0, 128, 63]));
        assert_eq!(
            decode_tensor(Complex64, &[1], |t| t.float_data = vec![1.0, 0.0]),
            Ok(vec![0, 0, 128, 63, 0, 0, 0, 0])
        );
        assert_eq!(decode_tensor(Float16, &[2], |t| t.int32_data = vec![0x3c00, 0xbc00]), Ok(vec![0, 0x3c, 0, 0xbc]));
        assert_eq!(decode_tensor(Int8, &[2], |t| t.int32_data = vec![-1, 255]), Ok(vec![255, 255]));
        assert_eq!(decode_tensor(Int32, &[1], |t| t.int32_data = vec![-2]), Ok(vec![254, 255, 255, 255]));
        assert_eq!(decode_tensor(Bool, &[3], |t| t.int32_data = vec![0, 1, 7]), Ok(vec![0, 1, 1]));
        assert_eq!(decode_tensor(Int4, &[3], |t| t.int32_data = vec![0x21, 0x03]), Ok(vec![0x21, 0x03]));
        assert_eq!(decode_tensor(Uint2, &[5], |t| t.int32_data = vec![0xe4, 1]), Ok(vec![0xe4, 1]));
        assert_eq!(decode_tensor(Uint32, &[1], |t| t.uint64_data = vec![7]), Ok(vec![7, 0, 0, 0]));
        assert_eq!(decode_tensor(Float6e2m3, &[4], |t| t.int32_data = vec![1, 2, 3, 63]), Ok(vec![0x81, 0x30, 0xfc]));
        assert_eq!(decode_tensor(Int64, &[0, 3], |_| {}), Ok(vec![]));
    }

    #[test]
    fn whatever_does_not_add_up_is_refused() {
        use DataType::*;
        type E = TensorError;
        let raw = |bytes: usize| move |t: &mut TensorProto| t.raw_data = Some(vec![0; bytes].into());
        assert!(matches!(decode_tensor(Float, &[4, 4], raw(63)), Err(E::Bytes { expected: 64, found: 63, .. })));
        assert!(matches!(decode_tensor(Float, &[4, 4], |_| {}), Err(E::Bytes { found: 0, .. })));
        assert!(matches!(decode_tensor(Float, &[-4, 4], raw(64)), Err(E::Size(SizeError::Negative { .. }))));
        assert!(matches!(decode_tensor(Float, &[1 << 62, 4], raw(16)), Err(E::Size(SizeError::Overflow { .. }))));
        assert!(matches!(decode_tensor(Undefined, &[1], raw(4)), Err(E::DataType(0))));
        assert!(matches!(
            decode_tensor(Float, &[1], |t| t.int32_data = vec![1]),
            Err(E::WrongField { field: "int32_data", .. })
        ));
        assert!(matches!(decode_tensor(Uint8, &[1], |t| t.int32_data = vec![256]), Err(E::Range { .. })));
        assert!(matches!(decode_tensor(Uint32, &[1], |t| t.uint64_data = vec![1 << 32]), Err(E::Range { .. })));
        assert!(matches!(
            decode_tensor(Float, &[2], |t| t.float_data = vec![1.0]),
            Err(E::Entries { expected: 2, found: 1, .. })
        ));
        assert!(matches!(decode_tensor(String, &[1], raw(4)), Err(E::WrongField { field: "raw_data", .. })));
        let two_sources = decode_tensor(Float, &[1], |t| {
            t.raw_data = Some(vec![0; 4].into());
            t.float_data = vec![0.0];
        });
        assert_eq!(two_sources, Err(E::TwoSources { first: "raw_data", second: "float_data" }));
    }
}
