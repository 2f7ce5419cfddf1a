//! Writes a .pt2 archive around JSON: a zip with stored entries, like `torch.export.save`.

use serde_json::Value;

/// Weights are zeros, limited to the first megabyte of the declared sizes.
pub fn write(model: &Value, weights: &Value) -> Vec<u8> {
    let mut entries = vec![
        ("archive_format".to_string(), b"pt2".to_vec()),
        ("archive_version".to_string(), b"0".to_vec()),
        ("byteorder".to_string(), b"little".to_vec()),
        ("models/model.json".to_string(), model.to_string().into_bytes()),
        ("data/weights/model_weights_config.json".to_string(), weights.to_string().into_bytes()),
        ("data/constants/model_constants_config.json".to_string(), br#"{"config": {}}"#.to_vec()),
    ];
    let config = weights.get("config").and_then(Value::as_object);
    for weight in config.into_iter().flatten().map(|(_, weight)| weight) {
        let Some(path) = weight.get("path_name").and_then(Value::as_str) else { continue };
        let name = format!("data/weights/{path}");
        if entries.iter().any(|(known, _)| *known == name) {
            continue;
        }
        let sizes = weight.pointer("/tensor_meta/sizes").and_then(Value::as_array);
        let elements = sizes.into_iter().flatten().fold(1u64, |product, size| {
            product.saturating_mul(size.get("as_int").and_then(Value::as_u64).unwrap_or(1))
        });
        let width = match weight.pointer("/tensor_meta/dtype").and_then(Value::as_u64) {
            Some(5 | 8) => 8,
            Some(4 | 7) => 4,
            Some(3 | 6 | 13) => 2,
            _ => 1,
        };
        entries.push((name, vec![0; elements.saturating_mul(width).min(1 << 20) as usize]));
    }
    zip(&entries)
}

fn zip(entries: &[(String, Vec<u8>)]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, content) in entries {
        let name = format!("case/{name}");
        let start = file.len() as u32;
        let mut fields = Vec::new();
        // Version, flags, method stored, time, date.
        [10u16, 0, 0, 0, 0x21].iter().for_each(|field| fields.extend(field.to_le_bytes()));
        [crc32(content), content.len() as u32, content.len() as u32]
            .iter()
            .for_each(|f| fields.extend(f.to_le_bytes()));
        [name.len() as u16, 0].iter().for_each(|field| fields.extend(field.to_le_bytes()));
        file.extend(b"PK\x03\x04");
        file.extend(&fields);
        file.extend(name.as_bytes());
        file.extend(content);
        directory.extend(b"PK\x01\x02\x0a\x00");
        directory.extend(&fields);
        // Comment, disk, attributes.
        directory.extend([0; 10]);
        directory.extend(start.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let (start, size, count) = (file.len() as u32, directory.len() as u32, entries.len() as u16);
    file.extend(directory);
    file.extend(b"PK\x05\x06\x00\x00\x00\x00");
    file.extend(count.to_le_bytes());
    file.extend(count.to_le_bytes());
    file.extend(size.to_le_bytes());
    file.extend(start.to_le_bytes());
    file.extend([0, 0]);
    file
}

/// CRC-32 (IEEE 802.3), bitwise.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |sum: u32, byte: &u8| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0xedb8_8320 & (sum & 1).wrapping_neg()))
    };
    !bytes.iter().fold(!0, step)
}
