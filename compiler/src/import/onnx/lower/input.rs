//! The inputs of a model with their shapes, and which symbol is the batch.
//!
//! A file that leaves the batch open names it. A static export has a number there: the symbol `batch` takes its place
//! along axis 0 of the first input (or along the axes that the caller says), and the number is remembered, because
//! constants of the file repeat it. That another input has the same number there tells nothing: which inputs have the
//! batch as well shows where their values meet, see `opening`.

use super::Frozen;
use super::weight::dtype_of;
use crate::import::onnx::element::element_name;
use crate::import::onnx::model::{Dim as SourceDim, ValueInfo};
use crate::import::onnx::name::shown;
use crate::op::dropout::COUNTER;
use crate::tensor::dim::{Bindings, Dim, DimError, is_symbol};
use crate::tensor::fact::Fact;
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// The symbol that a static batch gets.
const BATCH: &str = "batch";

/// Why inputs have no shape to start from.
#[derive(Debug, Error, PartialEq)]
pub enum InputError {
    /// Not even the rank is said.
    #[error("input `{}` has no shape", shown(name))]
    NoShape {
        /// The input.
        name: String,
    },
    /// An element type that pipec does not compute with.
    #[error("input `{}` has element type {}, which is not supported", shown(name), element_name(*elem_type))]
    ElementType {
        /// The input.
        name: String,
        /// Its code.
        elem_type: i32,
    },
    /// A name that pipec gives to an input of its own.
    #[error("an input is called `{COUNTER}`, which is the name of pipec's own counter; rename it")]
    Reserved,
    /// A size of zero.
    #[error("input `{}` is empty: its axis {axis} has size zero", shown(name))]
    Empty {
        /// The input.
        name: String,
        /// The axis.
        axis: usize,
    },
    /// A batch axis of an input that does not exist, or that has too few axes.
    #[error("no batch axis {axis} of `{}`: the inputs are {inputs}", shown(name))]
    BatchAxis {
        /// The input that was named.
        name: String,
        /// The axis.
        axis: usize,
        /// What there is.
        inputs: String,
    },
    /// Inputs whose batch axes differ in size.
    #[error("the batch axis of `{}` has size {found}, that of the others {expected}", shown(name))]
    BatchSize {
        /// The input.
        name: String,
        /// Its size there.
        found: Dim,
        /// The size of the first.
        expected: Dim,
    },
    /// A value for a dimension that the model does not have.
    #[error("the model has no open dimension `{}`; it has {open}", shown(name))]
    UnknownDim {
        /// The name that was given.
        name: String,
        /// What there is.
        open: String,
    },
    /// A size below 1.
    #[error("dimension `{}` cannot be {value}", shown(name))]
    Value {
        /// The dimension.
        name: String,
        /// The size.
        value: i64,
    },
    /// A size that cannot be worked out.
    #[error(transparent)]
    Dim(#[from] DimError),
}

/// The inputs, as a graph takes them.
#[derive(Clone, Debug, PartialEq)]
pub struct Inputs {
    /// Element type and shape of each input, in order.
    pub facts: Vec<Fact>,
    /// The same with the batch at the size that the file has, where it has one.
    pub fixed: Option<Vec<Fact>>,
    /// The symbol of the batch, `None` when no input has an axis for it.
    pub batch: Option<String>,
    /// The size of the batch, unless the caller says otherwise: his `--dim`, or the file's own.
    pub default: Option<i64>,
    /// What the batch symbol stands for in constants of the file.
    pub frozen: Frozen,
    /// The axes, by input, that got the batch symbol in place of a number.
    pub opened: BTreeMap<String, usize>,
    /// Other symbols that are left open.
    pub open: Vec<String>,
}

impl Inputs {
    /// Refuses an input without elements, unless there may be some.
    pub fn refuse_empty(&self, infos: &[ValueInfo], allowed: bool) -> Result<(), InputError> {
        let empty = |fact: &Fact| fact.shape.iter().position(|dim| dim.is(0));
        let found = infos.iter().zip(&self.facts).find_map(|(info, fact)| Some((info.name.clone(), empty(fact)?)));
        match found {
            Some((name, axis)) if !allowed => Err(InputError::Empty { name, axis }),
            _ => Ok(()),
        }
    }
}

/// Reads the inputs of a model. `values` gives sizes to open dimensions, `axes` the batch axis of inputs by name. Those
/// that are `unread` tell nothing of the batch while others are read.
pub fn read(
    infos: &[ValueInfo],
    values: &Bindings,
    axes: &BTreeMap<String, usize>,
    unread: &BTreeSet<String>,
) -> Result<Inputs, InputError> {
    if infos.iter().any(|info| info.name == COUNTER) {
        return Err(InputError::Reserved);
    }
    let mut symbols = Symbols::default();
    let facts = infos.iter().map(|info| fact(info, &mut symbols)).collect::<Result<Vec<_>, _>>()?;
    let by_name = |name: &str| infos.iter().position(|info| info.name == name);
    for (name, &axis) in axes {
        if by_name(name).is_none_or(|at| axis >= facts[at].rank()) {
            let told = infos.iter().zip(&facts).map(|(i, f)| format!("`{}` {f}", shown(&i.name)));
            let inputs = told.collect::<Vec<_>>().join(", ");
            return Err(InputError::BatchAxis { name: name.clone(), axis, inputs });
        }
    }
    // The input that says what the batch is: the first that the caller names, else the first that is read.
    let first = infos.iter().position(|info| !unread.contains(&info.name)).unwrap_or(0);
    let leader = axes.iter().next().and_then(|(name, &axis)| Some((by_name(name)?, axis)));
    let leader = leader.or_else(|| facts.get(first).filter(|f| f.rank() > 0).map(|_| (first, 0)));
    let size = leader.map(|(at, axis)| facts[at].shape[axis].clone());
    let mut inputs = Inputs {
        fixed: None,
        batch: size.as_ref().and_then(|d| d.symbols().into_iter().next()),
        default: None,
        frozen: Frozen::new(),
        opened: BTreeMap::new(),
        open: Vec::new(),
        facts,
    };
    // A batch of no samples stays a number: a symbol stands for at least one.
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

/// Gives open dimensions the sizes that the caller says. The batch stays open: its size is a default.
fn bind(inputs: &mut Inputs, values: &Bindings) -> Result<(), InputError> {
    let mut open: Vec<String> = inputs.facts.iter().flat_map(|f| f.shape.iter().flat_map(Dim::symbols)).collect();
    open.sort();
    open.dedup();
    let mut others = values.clone();
    for (name, &value) in values {
        if !open.contains(name) {
            let told: Vec<String> = open.iter().map(|s| format!("`{s}`")).collect();
            let open = if told.is_empty() { "none".to_string() } else { told.join(", ") };
            return Err(InputError::UnknownDim { name: name.clone(), open });
        }
        if value < 1 {
            return Err(InputError::Value { name: name.clone(), value });
        }
        if inputs.batch.as_ref() == Some(name) {
            inputs.default = Some(value);
            others.remove(name);
        }
    }
    for fact in inputs.facts.iter_mut().chain(inputs.fixed.iter_mut().flatten()) {
        *fact = fact.substitute(&others)?;
    }
    inputs.open = open.into_iter().filter(|s| !others.contains_key(s) && inputs.batch.as_ref() != Some(s)).collect();
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

/// Symbols by the names that the file has for them.
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
            // The symbols in it keep their names.
            for symbol in dim.symbols() {
                self.names.entry(symbol.clone()).or_insert(symbol);
            }
            return dim;
        }
        let symbol = self.new_name(text);
        self.names.insert(text.to_string(), symbol.clone());
        Dim::symbol(&symbol)
    }

    /// A symbol like `text` that no other dim has.
    fn new_name(&self, text: &str) -> String {
        let fits = |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '.' { c } else { '_' };
        let mut stem: String = text.chars().take(64).map(fits).collect();
        if !is_symbol(&stem) {
            stem.insert(0, '_');
        }
        let taken = |name: &str| self.names.values().any(|symbol| symbol == name);
        if !taken(&stem) {
            return stem;
        }
        let free = (1usize..).map(|n| format!("{stem}_{n}")).find(|name| !taken(name));
        free.unwrap_or(stem)
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

    fn told(infos: &[ValueInfo], values: &[(&str, i64)], axes: &[(&str, usize)]) -> Result<String, String> {
        let values = values.iter().map(|(n, v)| ((*n).to_string(), *v)).collect();
        let axes = axes.iter().map(|(n, a)| ((*n).to_string(), *a)).collect();
        let inputs = read(infos, &values, &axes, &BTreeSet::new()).map_err(|e| e.to_string())?;
        let facts: Vec<String> = inputs.facts.iter().map(Fact::to_string).collect();
        let batch = inputs.batch.unwrap_or_default();
        Ok(format!("{} {batch}={:?} open {:?}", facts.join(" "), inputs.default, inputs.open))
    }

    #[test]
    fn a_static_batch_gets_a_symbol() {
        let infos = [info("x", &["16", "64"]), info("target", &["16"]), info("table", &["97", "16"])];
        let want = "f32[batch, 64] f32[16] f32[97, 16] batch=Some(16) open []";
        assert_eq!(told(&infos, &[], &[]), Ok(want.into()));
        let want = "f32[16, 64] f32[16] f32[97, batch] batch=Some(16) open []";
        assert_eq!(told(&infos, &[], &[("table", 1)]), Ok(want.into()));
        let want = "f32[batch, 64] f32[batch] f32[97, 16] batch=Some(16) open []";
        assert_eq!(told(&infos, &[], &[("target", 0), ("x", 0)]), Ok(want.into()));
        assert_eq!(told(&infos[..1], &[("batch", 8)], &[]), Ok("f32[batch, 64] batch=Some(8) open []".into()));
        assert!(told(&infos, &[], &[("table", 0), ("x", 0)]).unwrap_err().contains("size 16"));
        assert!(told(&infos, &[], &[("y", 0)]).unwrap_err().contains("`y`"));
    }

    #[test]
    fn open_dimensions_keep_their_names() {
        let infos = [info("x", &["N", "seq len", "2*seq", ""])];
        let want = "f32[N, seq_len, seq*2, x_3] N=None open [\"seq\", \"seq_len\", \"x_3\"]";
        assert_eq!(told(&infos, &[], &[]), Ok(want.into()));
        let bound = "f32[N, 5, seq*2, x_3] N=Some(4) open [\"seq\", \"x_3\"]";
        assert_eq!(told(&infos, &[("N", 4), ("seq_len", 5)], &[]), Ok(bound.into()));
        assert!(told(&infos, &[("batch", 4)], &[]).unwrap_err().contains("`seq_len`"));
        assert!(told(&infos, &[("N", 0)], &[]).unwrap_err().contains("cannot be 0"));
        let (none, free) = ([info("x", &["0"])], BTreeMap::new());
        let inputs = read(&none, &Bindings::new(), &free, &BTreeSet::new()).unwrap();
        assert!(inputs.refuse_empty(&none, false).unwrap_err().to_string().contains("zero"));
        assert_eq!(inputs.refuse_empty(&none, true), Ok(()));
    }
}
