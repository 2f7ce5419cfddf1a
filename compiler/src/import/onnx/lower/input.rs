//! Model inputs, their shapes, and the batch symbol.
//!
//! A dynamic-batch file names its batch dimension. In a static export the batch is a number. Then the symbol `batch`
//! replaces it along axis 0 of the first input, or along the axes given by the caller. The number is kept, because
//! constants in the file repeat it. Equal sizes of other inputs are no evidence: `symbolic_batch` finds the inputs that
//! also have the batch axis from the operators that combine them.

use super::StaticSizes;
use super::weight::dtype_of;
use crate::import::equal_sizes::EqualSymbols;
use crate::import::onnx::element::element_name;
use crate::import::onnx::model::{Dim as SourceDim, ValueInfo};
use crate::op::dropout::COUNTER;
use crate::tensor::dim::{Bindings, Dim, DimError, is_symbol};
use crate::tensor::fact::Fact;
use crate::text::name::short_name;
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

const BATCH: &str = "batch";

#[derive(Debug, Error, PartialEq)]
pub enum InputError {
    #[error("input `{}` has no shape", short_name(name))]
    NoShape { name: String },
    #[error("input `{}` has element type {}, which is not supported", short_name(name), element_name(*elem_type))]
    ElementType { name: String, elem_type: i32 },
    /// The name is reserved for an input that pipec adds.
    #[error("input `{COUNTER}` has the name of pipec's internal counter; rename it")]
    Reserved,
    #[error("input `{}` is empty: its axis {axis} has size zero", short_name(name))]
    Empty { name: String, axis: usize },
    /// The batch axis refers to an unknown input, or to an axis that the input does not have.
    #[error("`{}` has no batch axis {axis}: the inputs are {inputs}", short_name(name))]
    BatchAxis { name: String, axis: usize, inputs: String },
    /// Batch axes of different sizes.
    #[error("the batch axis of `{}` has size {found}, other inputs have {expected}", short_name(name))]
    BatchSize {
        name: String,
        /// Size of its batch axis.
        found: Dim,
        /// Batch size of the first input.
        expected: Dim,
    },
    /// A size was given for a dimension that the model does not have.
    #[error("the model has no symbolic dimension `{}`; it has {open}", short_name(name))]
    UnknownDim { name: String, open: String },
    #[error("dimension `{}` cannot be {value}", short_name(name))]
    Value { name: String, value: i64 },
    #[error("dimensions `{}` and `{}` are equal, but were given different sizes", short_name(name), short_name(other))]
    Different { name: String, other: String },
    #[error(transparent)]
    Dim(#[from] DimError),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Inputs {
    /// Element type and shape of each input, in order.
    pub facts: Vec<Fact>,
    /// The same facts with the static batch size, for a static export.
    pub fixed: Option<Vec<Fact>>,
    /// The batch symbol; `None` if no input has a batch axis.
    pub batch: Option<String>,
    /// The default batch size: the caller's `--dim`, or the size in the file.
    pub default: Option<i64>,
    /// The value of the batch symbol in constants of the file.
    pub frozen: StaticSizes,
    /// By input, the axis where the batch symbol replaced a number.
    pub opened: BTreeMap<String, usize>,
    /// Symbols that were replaced by equal ones.
    pub equal: EqualSymbols,
    /// Other symbols that are still unbound.
    pub open: Vec<String>,
}

impl Inputs {
    /// True if no two symbols can be equal.
    pub fn has_one_symbol(&self) -> bool {
        self.open.len() + usize::from(self.batch.is_some()) < 2
    }

    /// Inputs with a symbol of their own along axis 0, each with that symbol, if no input has it along another axis.
    pub fn other_batches(&self, infos: &[ValueInfo]) -> Vec<(String, String)> {
        let is_inner = |symbol: &Dim| self.facts.iter().any(|fact| fact.shape.iter().skip(1).any(|dim| dim == symbol));
        let symbols = infos.iter().zip(&self.facts).filter_map(|(info, fact)| Some((info, fact.shape.first()?)));
        let others = symbols.filter(|(_, dim)| !is_inner(dim)).filter_map(|(info, dim)| {
            let symbol = self.open.iter().find(|symbol| Dim::symbol(symbol) == *dim)?;
            Some((info.name.clone(), symbol.clone()))
        });
        others.collect()
    }

    /// Replaces one of two equal symbols by the other: by the batch, or by that of an earlier input.
    pub fn merge(&self, one: &str, other: &str, equal: &mut EqualSymbols) {
        let [one, other] = [one, other].map(|name| equal.get(name).cloned().unwrap_or_else(|| name.to_string()));
        if one == other {
            return;
        }
        let all = self.facts.iter().flat_map(|fact| fact.shape.iter().flat_map(Dim::symbols));
        let first = self.batch.iter().cloned().chain(all).find(|name| *name == one || *name == other);
        let (kept, replaced) = if first.is_some_and(|name| name == one) { (one, other) } else { (other, one) };
        equal.values_mut().filter(|name| **name == replaced).for_each(|name| name.clone_from(&kept));
        equal.insert(replaced, kept);
    }

    /// Returns an error for an input with a zero dimension, unless `allowed`.
    pub fn refuse_empty(&self, infos: &[ValueInfo], allowed: bool) -> Result<(), InputError> {
        let empty = |fact: &Fact| fact.shape.iter().position(|dim| dim.is(0));
        let empty_dim = infos.iter().zip(&self.facts).find_map(|(info, fact)| Some((info.name.clone(), empty(fact)?)));
        match empty_dim {
            Some((name, axis)) if !allowed => Err(InputError::Empty { name, axis }),
            _ => Ok(()),
        }
    }
}

/// Reads the model inputs. `values` binds open dimensions, `axes` gives batch axes by input name. Inputs in `unread` do
/// not determine the batch if any input is read. `equal` replaces symbols.
pub fn read(
    infos: &[ValueInfo],
    values: &Bindings,
    axes: &BTreeMap<String, usize>,
    unread: &BTreeSet<String>,
    equal: &EqualSymbols,
) -> Result<Inputs, InputError> {
    if infos.iter().any(|info| info.name == COUNTER) {
        return Err(InputError::Reserved);
    }
    let mut symbols = Symbols::default();
    let renamed = |fact: Fact| Fact::new(fact.dtype, fact.shape.iter().map(|dim| dim.renamed(equal)).collect());
    let facts = infos.iter().map(|info| fact(info, &mut symbols).map(renamed)).collect::<Result<Vec<_>, _>>()?;
    let by_name = |name: &str| infos.iter().position(|info| info.name == name);
    for (name, &axis) in axes {
        if by_name(name).is_none_or(|at| axis >= facts[at].rank()) {
            let described = infos.iter().zip(&facts).map(|(i, f)| format!("`{}` {f}", short_name(&i.name)));
            let inputs = described.collect::<Vec<_>>().join(", ");
            return Err(InputError::BatchAxis { name: name.clone(), axis, inputs });
        }
    }
    // The batch is determined by the first input the caller names, else by the first that is read.
    let first = infos.iter().position(|info| !unread.contains(&info.name)).unwrap_or(0);
    let leader = axes.iter().next().and_then(|(name, &axis)| Some((by_name(name)?, axis)));
    let leader = leader.or_else(|| facts.get(first).filter(|f| f.rank() > 0).map(|_| (first, 0)));
    let size = leader.map(|(at, axis)| facts[at].shape[axis].clone());
    let mut equal = equal.clone();
    let facts = with_batch_where_unread(infos, facts, unread, size.as_ref(), &mut equal);
    let mut inputs = Inputs {
        fixed: None,
        batch: size.as_ref().and_then(|d| d.symbols().into_iter().next()),
        default: None,
        frozen: StaticSizes::new(),
        opened: BTreeMap::new(),
        equal,
        open: Vec::new(),
        facts,
    };
    // A batch of size zero stays a number, because symbols are at least 1.
    if let Some(number) = size.as_ref().and_then(Dim::known).filter(|number| *number > 0) {
        let symbol = symbols.new_name(BATCH);
        inputs.fixed = Some(inputs.facts.clone());
        inputs.default = Some(number);
        inputs.frozen.insert(symbol.clone(), number);
        let led = leader.filter(|_| axes.is_empty()).map(|(at, axis)| (infos[at].name.clone(), axis));
        inputs.opened = axes.clone().into_iter().chain(led).collect();
        for (name, &axis) in &inputs.opened {
            let dim = by_name(name).and_then(|at| inputs.facts[at].shape.get_mut(axis));
            match dim {
                Some(dim) if dim.is(number) => *dim = Dim::symbol(&symbol),
                Some(dim) => {
                    let expected = Dim::Known(number);
                    return Err(InputError::BatchSize { name: name.clone(), found: dim.clone(), expected });
                }
                None => {}
            }
        }
        inputs.batch = Some(symbol);
    }
    bind(&mut inputs, values)?;
    Ok(inputs)
}

/// Gives inputs that no operator reads the batch along axis 0, if they have a symbol of their own there.
fn with_batch_where_unread(
    infos: &[ValueInfo],
    mut facts: Vec<Fact>,
    unread: &BTreeSet<String>,
    size: Option<&Dim>,
    equal: &mut EqualSymbols,
) -> Vec<Fact> {
    let Some(size) = size.filter(|size| size.known().is_none()) else { return facts };
    let is_read = |info: &ValueInfo| !unread.contains(&info.name);
    let read = infos.iter().zip(&facts).filter(|(info, _)| is_read(info)).map(|(_, fact)| fact);
    let known: BTreeSet<String> = read.flat_map(|fact| fact.shape.iter().flat_map(Dim::symbols)).collect();
    for (_, fact) in infos.iter().zip(&mut facts).filter(|(info, _)| !is_read(info)) {
        if let Some(first) = fact.shape.first_mut().filter(|dim| dim.known().is_none())
            && first.symbols().iter().all(|symbol| !known.contains(symbol))
        {
            if let ([own], [batch]) = (first.symbols().as_slice(), size.symbols().as_slice()) {
                equal.insert(own.clone(), batch.clone());
            }
            first.clone_from(size);
        }
    }
    facts
}

/// Binds open dimensions to the given sizes. The batch stays symbolic; its size becomes the default.
fn bind(inputs: &mut Inputs, given: &Bindings) -> Result<(), InputError> {
    let mut unbound: Vec<String> = inputs.facts.iter().flat_map(|f| f.shape.iter().flat_map(Dim::symbols)).collect();
    unbound.sort();
    unbound.dedup();
    let mut bound = Bindings::new();
    let mut values: BTreeMap<&String, (&String, i64)> = BTreeMap::new();
    for (given, &value) in given {
        let name = inputs.equal.get(given).unwrap_or(given);
        match values.insert(name, (given, value)) {
            Some((other, before)) if before != value => {
                return Err(InputError::Different { name: given.clone(), other: other.clone() });
            }
            _ => {}
        }
    }
    for (name, (_, value)) in values {
        if !unbound.contains(name) {
            let names: Vec<String> = unbound.iter().map(|s| format!("`{s}`")).collect();
            let unbound = if names.is_empty() { "none".to_string() } else { names.join(", ") };
            return Err(InputError::UnknownDim { name: name.clone(), open: unbound });
        }
        if value < 1 {
            return Err(InputError::Value { name: name.clone(), value });
        }
        if inputs.batch.as_ref() == Some(name) {
            inputs.default = Some(value);
        } else {
            bound.insert(name.clone(), value);
        }
    }
    for fact in inputs.facts.iter_mut().chain(inputs.fixed.iter_mut().flatten()) {
        *fact = fact.substitute(&bound)?;
    }
    inputs.open = unbound.into_iter().filter(|s| !bound.contains_key(s) && inputs.batch.as_ref() != Some(s)).collect();
    Ok(())
}

fn fact(info: &ValueInfo, symbols: &mut Symbols) -> Result<Fact, InputError> {
    let name = &info.name;
    let unknown = || InputError::ElementType { name: name.clone(), elem_type: info.elem_type };
    let dtype = dtype_of(info.elem_type).ok_or_else(unknown)?;
    let dims = info.dims.as_ref().ok_or_else(|| InputError::NoShape { name: name.clone() })?;
    let dim = |(axis, dim): (usize, &SourceDim)| match dim {
        SourceDim::Known(size) => Dim::Known(*size),
        SourceDim::Param(text) => symbols.named(text),
        SourceDim::Unknown if axis == 0 => symbols.named(BATCH),
        SourceDim::Unknown => symbols.named(&format!("{name}_{axis}")),
    };
    Ok(Fact::new(dtype, dims.iter().enumerate().map(dim).collect()))
}

/// Maps dimension names in the file to valid symbols.
#[derive(Default)]
struct Symbols {
    names: BTreeMap<String, String>,
}

impl Symbols {
    /// The dim for a name in the file, which may be an expression such as `2*batch`.
    fn named(&mut self, text: &str) -> Dim {
        if let Some(symbol) = self.names.get(text) {
            return Dim::symbol(symbol);
        }
        if !is_symbol(text)
            && let Ok(dim) = Dim::parse(text)
            && dim.known().is_none()
        {
            // Symbols inside an expression keep their names.
            for symbol in dim.symbols() {
                self.names.entry(symbol.clone()).or_insert(symbol);
            }
            return dim;
        }
        let symbol = self.new_name(text);
        self.names.insert(text.to_string(), symbol.clone());
        Dim::symbol(&symbol)
    }

    /// A valid, unused symbol derived from `text`.
    fn new_name(&self, text: &str) -> String {
        let sanitise = |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '.' { c } else { '_' };
        let mut stem: String = text.chars().take(64).map(sanitise).collect();
        if !is_symbol(&stem) {
            stem.insert(0, '_');
        }
        let is_used = |name: &str| self.names.values().any(|symbol| symbol == name);
        if !is_used(&stem) {
            return stem;
        }
        let unused = (1usize..).map(|n| format!("{stem}_{n}")).find(|name| !is_used(name));
        unused.unwrap_or(stem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(name: &str, dims: &[&str]) -> ValueInfo {
        let dim = |text: &&str| match text.parse() {
            Ok(size) => SourceDim::Known(size),
            Err(_) if text.is_empty() => SourceDim::Unknown,
            Err(_) => SourceDim::Param((*text).to_string()),
        };
        ValueInfo { name: name.into(), elem_type: 1, dims: Some(dims.iter().map(dim).collect()) }
    }

    fn described(infos: &[ValueInfo], values: &[(&str, i64)], axes: &[(&str, usize)]) -> Result<String, String> {
        let values = values.iter().map(|(n, v)| ((*n).to_string(), *v)).collect();
        let axes = axes.iter().map(|(n, a)| ((*n).to_string(), *a)).collect();
        let inputs = read(infos, &values, &axes, &BTreeSet::new(), &EqualSymbols::new()).map_err(|e| e.to_string())?;
        let facts: Vec<String> = inputs.facts.iter().map(Fact::to_string).collect();
        let batch = inputs.batch.unwrap_or_default();
        Ok(format!("{} {batch}={:?} open {:?}", facts.join(" "), inputs.default, inputs.open))
    }

    #[test]
    fn a_static_batch_gets_a_symbol() {
        let infos = [info("x", &["16", "64"]), info("target", &["16"]), info("table", &["97", "16"])];
        let expected = "f32[batch, 64] f32[16] f32[97, 16] batch=Some(16) open []";
        assert_eq!(described(&infos, &[], &[]), Ok(expected.into()));
        let expected = "f32[16, 64] f32[16] f32[97, batch] batch=Some(16) open []";
        assert_eq!(described(&infos, &[], &[("table", 1)]), Ok(expected.into()));
        let expected = "f32[batch, 64] f32[batch] f32[97, 16] batch=Some(16) open []";
        assert_eq!(described(&infos, &[], &[("target", 0), ("x", 0)]), Ok(expected.into()));
        assert_eq!(described(&infos[..1], &[("batch", 8)], &[]), Ok("f32[batch, 64] batch=Some(8) open []".into()));
        assert!(described(&infos, &[], &[("table", 0), ("x", 0)]).unwrap_err().contains("size 16"));
        assert!(described(&infos, &[], &[("y", 0)]).unwrap_err().contains("`y`"));
    }

    #[test]
    fn equal_symbols_are_one() {
        let infos = [info("x", &["N", "s"]), info("mask", &["M", "s"]), info("unused", &["U"])];
        let (axes, unread) = (BTreeMap::new(), BTreeSet::from(["unused".to_string()]));
        let equal = EqualSymbols::from([("M".to_string(), "N".to_string())]);
        let read = |values: &[(&str, i64)]| {
            let values = values.iter().map(|(name, size)| (name.to_string(), *size)).collect();
            read(&infos, &values, &axes, &unread, &equal)
        };
        let inputs = read(&[("M", 8)]).unwrap();
        let facts: Vec<String> = inputs.facts.iter().map(Fact::to_string).collect();
        assert_eq!((facts.join(" "), inputs.default), ("f32[N, s] f32[N, s] f32[N]".to_string(), Some(8)));
        assert!(!inputs.has_one_symbol());
        let mut merged = EqualSymbols::new();
        [("s", "N"), ("t", "s"), ("N", "t")].iter().for_each(|(one, other)| inputs.merge(one, other, &mut merged));
        assert_eq!(merged, ["s", "t"].map(|name| (name.to_string(), "N".to_string())).into());
        assert!(matches!(read(&[("M", 8), ("N", 4)]), Err(InputError::Different { .. })));
    }

    #[test]
    fn open_dimensions_keep_their_names() {
        let infos = [info("x", &["N", "seq len", "2*seq", ""])];
        let expected = "f32[N, seq_len, seq*2, x_3] N=None open [\"seq\", \"seq_len\", \"x_3\"]";
        assert_eq!(described(&infos, &[], &[]), Ok(expected.into()));
        let with_sizes = "f32[N, 5, seq*2, x_3] N=Some(4) open [\"seq\", \"x_3\"]";
        assert_eq!(described(&infos, &[("N", 4), ("seq_len", 5)], &[]), Ok(with_sizes.into()));
        assert!(described(&infos, &[("batch", 4)], &[]).unwrap_err().contains("`seq_len`"));
        assert!(described(&infos, &[("N", 0)], &[]).unwrap_err().contains("cannot be 0"));
        let (no_batch, no_axes) = ([info("x", &["0"])], BTreeMap::new());
        let inputs = read(&no_batch, &Bindings::new(), &no_axes, &BTreeSet::new(), &EqualSymbols::new()).unwrap();
        assert!(inputs.refuse_empty(&no_batch, false).unwrap_err().to_string().contains("zero"));
        assert_eq!(inputs.refuse_empty(&no_batch, true), Ok(()));
    }
}
