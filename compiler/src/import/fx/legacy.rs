//! Archives of torch 2.6 and 2.7. The program is at the top level; weights are nested `torch.save` archives with a
//! pickled table of contents.
//!
//! The pickle is parsed as data and never executed. Only the opcodes of a table of tensors are accepted; a class is
//! just a name, and calls are known for four functions. The entries are renamed to the layout of later versions.

use crate::import::fx::entries::stored;
use crate::import::fx::error::FxError;
use bytes::Bytes;
use serde_json::json;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

pub const PROGRAM: &str = "serialized_exported_program.json";

/// Weights and constants: entry, folder and file stem in the layout of later versions.
const STORES: [(&str, &str, &str); 2] = [
    ("serialized_state_dict.pt", "data/weights/", "weights"),
    ("serialized_constants.pt", "data/constants/", "constants"),
];

/// Nesting limit of pickled values. A table of tensors nests six deep.
const DEEPEST: usize = 32;

/// Limit on the values on the stack, in the memo and appended, against hostile files.
const MOST: usize = 1 << 22;

const AXES: usize = 64;

/// Renames the entries to those of later versions.
pub fn rename_entries(entries: BTreeMap<String, Bytes>) -> Result<BTreeMap<String, Bytes>, FxError> {
    let mut new_entries = BTreeMap::new();
    for (entry, folder, kind) in STORES {
        let Some(bytes) = entries.get(entry).filter(|bytes| !bytes.is_empty()) else { continue };
        let error = |reason: String| FxError::Table { entry: entry.to_string(), reason };
        let inner = stored(bytes)?;
        let find = |name: &str| inner.iter().find_map(|(n, b)| (n.split_once('/')?.1 == name).then_some(b));
        if find("byteorder").is_some_and(|order| order.as_ref() != b"little") {
            return Err(error("its numbers are not little-endian".to_string()));
        }
        let pickle = find("data.pkl").ok_or_else(|| error("it has no data.pkl".to_string()))?;
        let table = tensors(pickle).map_err(|reason| error(reason.to_string()))?;
        let mut config = serde_json::Map::new();
        for (name, tensor) in table {
            let sizes = |list: &[i64]| list.iter().map(|n| json!({"as_int": n})).collect::<Vec<_>>();
            if let Some(storage) = find(&format!("data/{}", tensor.storage)) {
                new_entries.insert(format!("{folder}{}", tensor.storage), storage.clone());
            }
            let meta = json!({
                "dtype": tensor.dtype, "sizes": sizes(&tensor.sizes), "strides": sizes(&tensor.strides),
                "storage_offset": {"as_int": tensor.offset}, "layout": 7, "requires_grad": false,
            });
            config.insert(name, json!({"path_name": tensor.storage, "use_pickle": false, "tensor_meta": meta}));
        }
        let document = json!({ "config": config }).to_string();
        new_entries.insert(format!("{folder}model_{kind}_config.json"), Bytes::from(document));
    }
    if let Some(program) = entries.get(PROGRAM) {
        new_entries.insert("models/model.json".to_string(), program.clone());
    }
    Ok(new_entries)
}

#[derive(Clone, Debug, PartialEq)]
struct Stored {
    storage: String,
    dtype: i64,
    offset: i64,
    sizes: Vec<i64>,
    strides: Vec<i64>,
}

#[derive(Debug)]
enum PickleValue {
    None,
    Truth,
    Number(i64),
    Text(String),
    /// A class or function, as `module name`.
    Global(String),
    List(Vec<NestedValue>),
    Table(Vec<(NestedValue, NestedValue)>),
    /// Element type code and entry.
    Storage(i64, String),
    Tensor(Stored),
}

/// A value and its nesting depth.
#[derive(Clone, Debug)]
struct NestedValue {
    value: Rc<PickleValue>,
    depth: usize,
}

impl NestedValue {
    fn new(value: PickleValue) -> Result<NestedValue, &'static str> {
        let inner_depth = match &value {
            PickleValue::List(list) => list.iter().map(|item| item.depth).max(),
            PickleValue::Table(rows) => rows.iter().map(|(key, value)| key.depth.max(value.depth)).max(),
            _ => None,
        };
        let depth = inner_depth.map_or(0, |depth| depth + 1);
        if depth > DEEPEST {
            Err("data.pkl is nested more than 32 levels deep")
        } else {
            Ok(NestedValue { value: Rc::new(value), depth })
        }
    }
}

const CUT: &str = "data.pkl ends early";
const OTHER: &str = "data.pkl is not a dictionary of tensors";

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], &'static str> {
        let (head, rest) = self.0.split_at_checked(count).ok_or(CUT)?;
        self.0 = rest;
        Ok(head)
    }

    /// A little-endian integer of up to eight bytes.
    fn number(&mut self, bytes: usize, signed: bool) -> Result<i64, &'static str> {
        let source = self.take(bytes)?;
        if bytes > 8 {
            return Err("a number in data.pkl has more than eight bytes");
        }
        let negative = signed && source.last().is_some_and(|byte| byte & 0x80 != 0);
        let mut buffer = [if negative { 0xff } else { 0 }; 8];
        buffer[..bytes].copy_from_slice(source);
        Ok(i64::from_le_bytes(buffer))
    }

    fn size(&mut self, bytes: usize) -> Result<usize, &'static str> {
        usize::try_from(self.number(bytes, false)?).map_err(|_| CUT)
    }

    fn line(&mut self) -> Result<String, &'static str> {
        let end = self.0.iter().take(256).position(|byte| *byte == b'\n').ok_or(CUT)?;
        let line = self.take(end + 1)?;
        String::from_utf8(line[..end].to_vec()).map_err(|_| OTHER)
    }
}

/// The tensors in a pickled table, by name.
fn tensors(pickle: &[u8]) -> Result<Vec<(String, Stored)>, &'static str> {
    let PickleValue::Table(rows) = &*read(pickle)?.value else { return Err(OTHER) };
    let mut tensors = Vec::with_capacity(rows.len());
    for (key, value) in rows {
        match (&*key.value, &*value.value) {
            (PickleValue::Text(name), PickleValue::Tensor(tensor)) => tensors.push((name.clone(), tensor.clone())),
            // Constants may be non-tensors, which no operator reads.
            (PickleValue::Text(_), _) => {}
            _ => return Err(OTHER),
        }
    }
    Ok(tensors)
}

/// Parses a protocol 2 pickle as far as tables of tensors need it (opcodes as in Python's `pickletools`).
fn read(pickle: &[u8]) -> Result<NestedValue, &'static str> {
    let mut reader = Reader(pickle);
    let mut stack: Vec<NestedValue> = Vec::new();
    let mut marks: Vec<usize> = Vec::new();
    let mut memo: HashMap<usize, NestedValue> = HashMap::new();
    // Appending copies a list, so the total work is bounded.
    let mut copied = 0;
    loop {
        if copied > MOST || stack.len() > MOST || memo.len() > MOST || marks.len() > MOST {
            return Err("data.pkl is too large");
        }
        let code = reader.take(1)?[0];
        let value = match code {
            // PROTO, FRAME
            0x80 => {
                reader.take(1)?;
                continue;
            }
            0x95 => {
                reader.take(8)?;
                continue;
            }
            b'.' => return stack.pop().ok_or(OTHER),
            b'(' => {
                marks.push(stack.len());
                continue;
            }
            // BINPUT, LONG_BINPUT, MEMOIZE
            b'q' | b'r' | 0x94 => {
                let at = match code {
                    b'q' => reader.size(1)?,
                    b'r' => reader.size(4)?,
                    _ => memo.len(),
                };
                memo.insert(at, stack.last().ok_or(OTHER)?.clone());
                continue;
            }
            b'h' | b'j' => {
                let at = reader.size(if code == b'h' { 1 } else { 4 })?;
                stack.push(memo.get(&at).ok_or(OTHER)?.clone());
                continue;
            }
            b'N' => PickleValue::None,
            0x88 | 0x89 => PickleValue::Truth,
            b'K' => PickleValue::Number(reader.number(1, false)?),
            b'M' => PickleValue::Number(reader.number(2, false)?),
            b'J' => PickleValue::Number(reader.number(4, true)?),
            0x8a => {
                let bytes = reader.size(1)?;
                PickleValue::Number(reader.number(bytes, true)?)
            }
            // A float: its value is not needed.
            b'G' => {
                reader.take(8)?;
                PickleValue::None
            }
            b'X' | 0x8c => {
                let bytes = reader.size(if code == b'X' { 4 } else { 1 })?;
                PickleValue::Text(String::from_utf8(reader.take(bytes)?.to_vec()).map_err(|_| OTHER)?)
            }
            b'c' => PickleValue::Global(format!("{} {}", reader.line()?, reader.line()?)),
            b'}' => PickleValue::Table(Vec::new()),
            b')' | b']' => PickleValue::List(Vec::new()),
            0x85..=0x87 => PickleValue::List(pop_many(&mut stack, usize::from(code - 0x84))?),
            b't' => PickleValue::List(pop_to_mark(&mut stack, &mut marks)?),
            b'a' | b'e' => {
                let items = if code == b'e' { pop_to_mark(&mut stack, &mut marks)? } else { pop_many(&mut stack, 1)? };
                let PickleValue::List(mut list) = unwrap_shared(stack.pop().ok_or(OTHER)?) else { return Err(OTHER) };
                copied += list.len();
                list.extend(items);
                PickleValue::List(list)
            }
            b's' | b'u' => {
                let items = if code == b'u' { pop_to_mark(&mut stack, &mut marks)? } else { pop_many(&mut stack, 2)? };
                let PickleValue::Table(mut rows) = unwrap_shared(stack.pop().ok_or(OTHER)?) else { return Err(OTHER) };
                copied += rows.len();
                rows.extend(items.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())));
                PickleValue::Table(rows)
            }
            // BUILD: attributes of a table, ignored.
            b'b' => {
                pop_many(&mut stack, 1)?;
                continue;
            }
            b'Q' => storage(&stack.pop().ok_or(OTHER)?)?,
            b'R' => {
                let [function, arguments] = pop_many(&mut stack, 2)?.try_into().map_err(|_| OTHER)?;
                evaluate_call(&function, &arguments)?
            }
            _ => return Err(OTHER),
        };
        stack.push(NestedValue::new(value)?);
    }
}

fn pop_many(stack: &mut Vec<NestedValue>, count: usize) -> Result<Vec<NestedValue>, &'static str> {
    let at = stack.len().checked_sub(count).ok_or(OTHER)?;
    Ok(stack.split_off(at))
}

fn pop_to_mark(stack: &mut Vec<NestedValue>, marks: &mut Vec<usize>) -> Result<Vec<NestedValue>, &'static str> {
    let at = marks.pop().filter(|at| *at <= stack.len()).ok_or(OTHER)?;
    Ok(stack.split_off(at))
}

/// Takes the value out of its `Rc`. A memoised list is copied: the memo keeps the old state, which tables never read.
fn unwrap_shared(nested: NestedValue) -> PickleValue {
    Rc::try_unwrap(nested.value).unwrap_or_else(|shared| match &*shared {
        PickleValue::List(list) => PickleValue::List(list.clone()),
        PickleValue::Table(rows) => PickleValue::Table(rows.clone()),
        _ => PickleValue::None,
    })
}

/// Parses `('storage', torch.FloatStorage, '0', 'cpu', 128)`.
fn storage(id: &NestedValue) -> Result<PickleValue, &'static str> {
    let PickleValue::List(parts) = &*id.value else { return Err(OTHER) };
    let [kind, class, key, ..] = parts.as_slice() else { return Err(OTHER) };
    let (PickleValue::Text(kind), PickleValue::Global(class), PickleValue::Text(key)) =
        (&*kind.value, &*class.value, &*key.value)
    else {
        return Err(OTHER);
    };
    let dtype = match class.as_str() {
        "torch ByteStorage" => 1,
        "torch CharStorage" => 2,
        "torch ShortStorage" => 3,
        "torch IntStorage" => 4,
        "torch LongStorage" => 5,
        "torch HalfStorage" => 6,
        "torch FloatStorage" => 7,
        "torch DoubleStorage" => 8,
        "torch BoolStorage" => 12,
        "torch BFloat16Storage" => 13,
        _ => return Err("data.pkl has tensors of an element type that is not supported"),
    };
    let is_plain = kind == "storage" && key.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_plain.then(|| PickleValue::Storage(dtype, key.clone())).ok_or(OTHER)
}

/// The result of one of the calls that a table of tensors contains.
fn evaluate_call(function: &NestedValue, arguments: &NestedValue) -> Result<PickleValue, &'static str> {
    let (PickleValue::Global(name), PickleValue::List(arguments)) = (&*function.value, &*arguments.value) else {
        return Err(OTHER);
    };
    match name.as_str() {
        "collections OrderedDict" if arguments.is_empty() => Ok(PickleValue::Table(Vec::new())),
        "torch._utils _rebuild_parameter" => match arguments.first().map(|first| &*first.value) {
            Some(PickleValue::Tensor(tensor)) => Ok(PickleValue::Tensor(tensor.clone())),
            _ => Err(OTHER),
        },
        "torch._utils _rebuild_tensor_v2" => {
            let [storage, offset, sizes, strides, ..] = arguments.as_slice() else { return Err(OTHER) };
            let (PickleValue::Storage(dtype, storage), PickleValue::Number(offset)) = (&*storage.value, &*offset.value)
            else {
                return Err(OTHER);
            };
            let (sizes, strides) = (numbers(sizes)?, numbers(strides)?);
            Ok(PickleValue::Tensor(Stored { storage: storage.clone(), dtype: *dtype, offset: *offset, sizes, strides }))
        }
        "torch Size" => match arguments.first() {
            Some(list) => Ok(PickleValue::List(
                numbers(list)?.into_iter().map(PickleValue::Number).map(NestedValue::new).collect::<Result<_, _>>()?,
            )),
            None => Err(OTHER),
        },
        _ => Err("data.pkl calls a function other than those that rebuild tensors; pipec never runs a pickle"),
    }
}

fn numbers(list: &NestedValue) -> Result<Vec<i64>, &'static str> {
    let PickleValue::List(list) = &*list.value else { return Err(OTHER) };
    if list.len() > AXES {
        return Err("a tensor in data.pkl has more than 64 axes");
    }
    let number = |nested: &NestedValue| match &*nested.value {
        PickleValue::Number(number) => Ok(*number),
        _ => Err(OTHER),
    };
    list.iter().map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `{'w': tensor of 2 × 3 in storage 0}` as torch writes it.
    fn table() -> Vec<u8> {
        let mut bytes = b"\x80\x02}q\x00X\x01\x00\x00\x00wq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x02((".to_vec();
        bytes.extend(b"X\x07\x00\x00\x00storageq\x03ctorch\nFloatStorage\nq\x04X\x01\x00\x00\x000q\x05");
        bytes.extend(b"X\x03\x00\x00\x00cpuq\x06K\x06tq\x07QK\x00K\x02K\x03\x86q\x08K\x03K\x01\x86q\x09\x89");
        bytes.extend(b"ccollections\nOrderedDict\nq\x0a)Rq\x0btq\x0cRq\x0ds.");
        bytes
    }

    #[test]
    fn a_table_of_tensors_is_read_as_data() {
        let stored = tensors(&table()).unwrap();
        let tensor = Stored { storage: "0".into(), dtype: 7, offset: 0, sizes: vec![2, 3], strides: vec![3, 1] };
        assert_eq!(stored, [("w".to_string(), tensor)]);
    }

    #[test]
    fn anything_else_is_refused() {
        // os.system('true')
        assert!(tensors(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.").unwrap_err().contains("never runs"));
        let mut deep = b"\x80\x02".to_vec();
        deep.extend([b')']);
        deep.extend([0x85; 64]);
        deep.push(b'.');
        assert!(tensors(&deep).unwrap_err().contains("levels deep"));
        // A truncated or corrupted table is parsed or refused, without a panic.
        let pickle = table();
        for at in 0..pickle.len() {
            assert!(tensors(&pickle[..at]).is_err(), "{at}");
            for byte in [0, b'(', b't', b'R', b'u', 0xff] {
                let mut other = pickle.clone();
                other[at] = byte;
                let _ = tensors(&other);
            }
        }
    }
}
