//! Lowers the nodes of a program in order and functionalises in-place operators.
//!
//! After an operator changes tensor `a`, the name `a` and all exact aliases map to its result. If `a` is a view, its
//! elements are written back into the base. Other views of the base are recomputed on their next use. Counters of
//! minibatches are ignored: no output depends on them.
//!
//! Errors are collected: the outputs of a failed node stay undefined, and nodes that read them are skipped. The shape
//! of every result is compared with the file's.

use super::alias;
use super::live::live;
use super::{Known, Names, NodeOutputs, Scope, complex, support, table};
use crate::graph::{Graph, Origin, Output};
use crate::import::build::Build;
use crate::import::equal_sizes::{EqualSymbols, agree};
use crate::import::fx::lower::{detach, in_place};
use crate::import::fx::program::{Program, label, names};
use crate::import::fx::schema::{self, Argument, SymArgument};
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::error::{Fault, Faults, LowerError};
use crate::import::onnx::lower::lower_model::{Lowered, used_weights};
use crate::import::onnx::lower::{ImportedWeights, StaticSizes, Weight};
use crate::import::prune::prune;
use crate::import::symbolic_batch;
use crate::op::table::rule;
use crate::op::{Input, NodeId, Op, Value};
use crate::tensor::dim::{Bindings, Dim};
use crate::tensor::fact::Fact;
use crate::text::name::short_name;
use std::collections::HashMap;

/// State of a view after its elements changed.
const CHANGED: Known = Known::Absent("a view of a tensor that was modified in place afterwards");

/// State of a minibatch counter after it was incremented.
const COUNTED: Known = Known::Absent("a minibatch counter");

const MOST_VIEWS: usize = 4096;

/// Limit on the length of a chain of views.
const DEEPEST: usize = 32;

/// Checks that every operator is supported.
pub fn check(program: &Program) -> Result<(), LowerError> {
    support::check(&program.graph).map_err(LowerError::Unsupported)
}

/// Lowers a program whose operators passed [`check`], for inputs of the given types and shapes.
pub fn lower(
    program: &Program,
    inputs: &[Fact],
    frozen: &StaticSizes,
    equal: &EqualSymbols,
) -> Result<Lowered, LowerError> {
    let weight = |s: &crate::import::fx::program::Source| {
        Weight::new(s.name.clone(), s.fact.clone(), s.initial.clone(), s.parameter && s.fact.dtype.is_float())
    };
    let mut walk = Walk {
        program,
        frozen,
        equal,
        bindings: Bindings::new(),
        graph: Graph::new(&program.name),
        constants: HashMap::new(),
        ledger: ImportedWeights { weights: program.weights.iter().map(weight).collect(), ..ImportedWeights::default() },
        faults: Vec::new(),
        gradients: Vec::new(),
    };
    let mut names = Names::default();
    for (name, at) in &program.placeholders {
        names.tensors.insert(name.clone(), Known::Weight(*at));
    }
    for (info, fact) in program.inputs.iter().zip(inputs) {
        let op = Op::Input(Input { name: info.name.clone(), fact: fact.clone() });
        let node = walk.graph.add(op, &[], &Origin::default())?;
        names.tensors.insert(info.name.clone(), Known::Value(Value { node, output: 0 }));
        walk.note(&info.name, fact);
    }
    for (at, _) in program.weights.iter().enumerate().filter(|(_, source)| source.kept) {
        walk.scope(&empty_node(), &names).weight(at, true).map_err(|reason| LowerError::Output {
            name: program.weights[at].name.clone(),
            reason: Box::new(reason),
        })?;
    }
    walk.nodes(&mut names);
    if !walk.faults.is_empty() {
        return Err(LowerError::Nodes(Faults(walk.faults)));
    }
    walk.finish(&names)
}

struct Walk<'a> {
    program: &'a Program,
    frozen: &'a StaticSizes,
    equal: &'a EqualSymbols,
    /// Values that the caller bound to symbols of the file.
    bindings: Bindings,
    graph: Graph,
    constants: HashMap<usize, Value>,
    ledger: ImportedWeights,
    faults: Vec<Fault>,
    /// Per node of the graph, filled on demand: gradients can flow from it to a parameter.
    gradients: Vec<bool>,
}

/// Alias classes: names that view elements of one tensor.
#[derive(Default)]
struct Views<'g> {
    class: HashMap<String, usize>,
    members: Vec<Vec<String>>,
    /// Per view, the node that made it and its base.
    makers: HashMap<String, (&'g schema::Node, &'g str)>,
}

impl<'g> Views<'g> {
    fn show(&mut self, name: &str, base: &'g str, maker: &'g schema::Node) {
        self.join(name, base);
        self.makers.insert(name.to_string(), (maker, base));
    }

    fn class_of(&mut self, name: &str) -> usize {
        if let Some(class) = self.class.get(name) {
            return *class;
        }
        self.class.insert(name.to_string(), self.members.len());
        self.members.push(vec![name.to_string()]);
        self.members.len() - 1
    }

    fn join(&mut self, name: &str, base: &str) {
        let class = self.class_of(base);
        self.class.insert(name.to_string(), class);
        self.members[class].push(name.to_string());
    }
}

impl Walk<'_> {
    /// The element type and shape that the file gives a value, with one symbol for equal ones.
    fn declared(&self, name: &str) -> Option<Fact> {
        let fact = self.program.fact(self.program.graph.tensor_values.get(name)?)?;
        Some(Fact::new(fact.dtype, fact.shape.iter().map(|dim| dim.renamed(self.equal)).collect()))
    }

    /// Binds the symbols of an input to the sizes that the caller gave.
    fn note(&mut self, name: &str, fact: &Fact) {
        let Some(declared) = self.declared(name) else { return };
        for (declared, have) in declared.shape.iter().zip(&fact.shape) {
            if let ([symbol], Some(value)) = (declared.symbols().as_slice(), have.known())
                && *declared == Dim::symbol(symbol)
            {
                self.bindings.insert(symbol.clone(), value);
            }
        }
    }

    fn nodes(&mut self, outer: &mut Names) {
        let program = self.program;
        let mut views = Views::default();
        for node in live(&program.graph) {
            self.recompute_stale_views(node, outer, &views);
            match self.node(node, outer).and_then(|outputs| self.named(node, outputs, outer, &mut views)) {
                Ok(()) | Err(None) => {}
                Err(Some(reason)) => {
                    let operator = node.target.strip_prefix("torch.ops.").unwrap_or(&node.target).to_string();
                    let [module, line] = [&node.metadata.module, &node.metadata.line].map(ToString::to_string);
                    self.faults.push(Fault { node: label(node), operator, module, line, reason });
                }
            }
        }
    }

    fn recompute_stale_views(&mut self, node: &schema::Node, outer: &mut Names, views: &Views<'_>) {
        for input in &node.inputs {
            for name in names(&input.arg) {
                let mut makers = Vec::new();
                let mut stale = name;
                while outer.tensors.get(stale) == Some(&CHANGED) && makers.len() < DEEPEST {
                    let Some((maker, base)) = views.makers.get(stale).copied() else { break };
                    makers.push(maker);
                    stale = base;
                }
                for maker in makers.into_iter().rev() {
                    let Some(lower) = table::find(&maker.target) else { break };
                    // A view that cannot be recomputed stays stale; its reader reports the error.
                    let mut scope = self.scope(maker, outer);
                    let outputs = lower(&mut scope).and_then(|outputs| match maker.region.no_gradients {
                        true => without_gradients(&mut scope, outputs),
                        false => Ok(outputs),
                    });
                    let Ok(NodeOutputs::Tensors(outputs)) = outputs else { break };
                    for (name, known) in maker.outputs.iter().flat_map(names).zip(outputs) {
                        if outer.tensors.get(name) == Some(&CHANGED) {
                            outer.tensors.insert(name.to_string(), known);
                        }
                    }
                }
            }
        }
    }

    /// Casts the float operands of a node under autocast to the element type that the file gives its first result.
    /// Autocast inserts such casts without recording them. `None` if the node casts nothing.
    fn cast_operands(&mut self, node: &schema::Node, outer: &Names) -> Result<Option<Names>, LowerReason> {
        let declared = &self.program.graph.tensor_values;
        let keeps_types = |node: &schema::Node| table::is_cast(&node.target) || table::in_place(&node.target);
        if !node.region.autocast || keeps_types(node) || !alias::views(node, declared).is_empty() {
            return Ok(None);
        }
        let first = node.outputs.iter().flat_map(names).next();
        let declared = first.and_then(|name| self.program.fact(declared.get(name)?));
        let Some(to) = declared.map(|fact| fact.dtype).filter(|dtype| dtype.is_float()) else { return Ok(None) };
        let cast = |_: &str, known: Known| {
            if matches!(known, Known::Absent(_) | Known::Complex(..)) {
                return Ok(known);
            }
            let mut scope = self.scope(node, outer);
            let value = scope.read(known)?;
            let is_float = scope.fact(value).dtype.is_float();
            Ok(Known::Value(if is_float { scope.cast(value, to)? } else { value }))
        };
        outer.mapped(node, cast).map(Some)
    }

    /// Lowers a node; `Err(None)` if one of its inputs is undefined.
    fn node(&mut self, node: &schema::Node, outer: &Names) -> Result<NodeOutputs, Option<LowerReason>> {
        let is_defined = |name: &str| outer.tensors.contains_key(name) || outer.sizes.contains_key(name);
        if !node.inputs.iter().flat_map(|input| names(&input.arg)).all(is_defined) {
            return Err(None);
        }
        if alias::writes_several(node) {
            return Err(Some(LowerReason::Unsupported("a write to several `out` arguments".to_string())));
        }
        if let Some(written) = alias::written(node)
            && let Some(Known::Weight(at)) = outer.tensors.get(written)
            && let Some(outputs) = self.counter(node, *at)?
        {
            return Ok(outputs);
        }
        let is_complex = |name: &str| matches!(outer.tensors.get(name), Some(Known::Complex(..)));
        let reads_complex = node.inputs.iter().flat_map(|input| names(&input.arg)).any(is_complex);
        let lower = complex::find(reads_complex, &node.target).or_else(|| table::find(&node.target));
        let lower = lower.ok_or_else(|| Some(LowerReason::Unsupported(node.target.clone())))?;
        let gradients = !node.region.no_gradients && !stops_gradient(node);
        let cast = self.cast_operands(node, outer)?;
        let mut scope = self.scope(node, cast.as_ref().unwrap_or(outer));
        let outputs = lower(&mut scope)?;
        Ok(if gradients { outputs } else { without_gradients(&mut scope, outputs)? })
    }

    fn has_gradient(&mut self, value: Value) -> bool {
        for id in self.graph.ids().skip(self.gradients.len()) {
            let node = self.graph.node(id);
            let passes = match &node.op {
                Op::Parameter(_) => true,
                Op::StopGradient(_) => false,
                _ => self.graph.inputs(id).iter().any(|input| self.gradients[input.node.0 as usize]),
            };
            self.gradients.push(passes && node.facts.iter().any(|fact| fact.dtype.is_float()));
        }
        self.gradients[value.node.0 as usize]
    }

    fn scope<'s>(&'s mut self, node: &'s schema::Node, names: &'s Names) -> Scope<'s> {
        Scope {
            node,
            origin: Origin { source: label(node), module: node.metadata.module.to_string() },
            names,
            metas: &self.program.graph.tensor_values,
            frozen: self.frozen,
            graph: &mut self.graph,
            constants: &mut self.constants,
            ledger: &mut self.ledger,
        }
    }

    /// Handles a write to a weight: a counter is ignored, any other is refused.
    fn counter(&self, node: &schema::Node, at: usize) -> Result<Option<NodeOutputs>, LowerReason> {
        let weight = &self.ledger.weights[at];
        if !weight.trainable && table::name(&node.target) == "detach_" {
            return Ok(Some(NodeOutputs::Tensors(vec![Known::Weight(at)])));
        }
        if weight.trainable || weight.fact.dtype.is_float() || weight.fact.rank() > 0 {
            return Err(LowerReason::Unsupported(format!("an in-place change of `{}`", short_name(&weight.name))));
        }
        Ok(Some(NodeOutputs::Tensors(vec![COUNTED])))
    }

    fn named<'g>(
        &mut self,
        node: &'g schema::Node,
        outputs: NodeOutputs,
        outer: &mut Names,
        views: &mut Views<'g>,
    ) -> Result<(), Option<LowerReason>> {
        let outputs = match outputs {
            NodeOutputs::Size(dim) => {
                for output in &node.outputs {
                    if let Argument::AsSymInt(SymArgument::AsName(name)) = output {
                        outer.sizes.insert(name.clone(), dim.clone());
                    }
                }
                return Ok(());
            }
            NodeOutputs::Tensors(outputs) => outputs,
        };
        let mut outputs = outputs.into_iter();
        let written = alias::written(node);
        let bases: HashMap<&str, &str> = alias::views(node, &self.program.graph.tensor_values).into_iter().collect();
        let skipped = node.outputs.iter().map(|output| matches!(output, Argument::AsNone(_)));
        let output_names = skipped.zip(&node.outputs).flat_map(|(skipped, output)| match skipped {
            true => vec![None],
            false => names(output).map(Some).collect(),
        });
        for name in output_names {
            // An unused output still has a place in the list.
            let Some(name) = name else {
                outputs.next();
                continue;
            };
            let mut known = outputs.next().unwrap_or(Known::Absent("an output that its operator does not have"));
            if known != COUNTED
                && let Some(operand) = written
            {
                known = self.replace(node, operand, known, outer, views)?;
                views.join(name, operand);
            } else if let Some(base) = bases.get(name) {
                views.show(name, base, node);
            }
            self.compare(name, known)?;
            outer.tensors.insert(name.to_string(), known);
        }
        Ok(())
    }

    /// Rebinds the operand of an in-place operator, or an `out` argument, and its aliases, to the new value.
    fn replace(
        &mut self,
        node: &schema::Node,
        operand: &str,
        new: Known,
        outer: &mut Names,
        views: &mut Views<'_>,
    ) -> Result<Known, LowerReason> {
        let old = outer.tensors.get(operand).copied().unwrap_or(CHANGED);
        if old == new {
            return Ok(new);
        }
        // The operand keeps its element type and shape after promotion.
        let fact = match old {
            Known::Value(value) => self.graph.fact(value).clone(),
            _ => {
                return Err(LowerReason::Unsupported(
                    "an in-place change of a value that is not a plain tensor".to_string(),
                ));
            }
        };
        let mut scope = self.scope(node, outer);
        let value = scope.read(new)?;
        let value = scope.cast(value, fact.dtype)?;
        let shape = scope.fact(value).shape;
        let differs = |(have, want): (&Dim, &Dim)| have.known().is_some() && want.known().is_some() && have != want;
        let is_other = shape.len() != fact.rank() || shape.iter().zip(&fact.shape).any(differs);
        if !table::in_place(&node.target) && is_other {
            return Err(LowerReason::Unsupported("an `out` argument of another shape".to_string()));
        }
        let shape = symbolic_batch::shape_with_batch(&scope, &fact.shape, &scope.fact(value).shape)?;
        let value = scope.broadcast(value, shape)?;
        let class = views.class_of(operand);
        if alias::reshapes_in_place(&node.target) && views.members[class].len() > 1 {
            return Err(LowerReason::Unsupported("an in-place change of shape of a tensor that has views".to_string()));
        }
        if views.members[class].len() > MOST_VIEWS {
            return Err(LowerReason::Unsupported(format!("an in-place change of a tensor with {MOST_VIEWS} views")));
        }
        let mut changes = vec![(old, Known::Value(value))];
        self.write_back(operand, value, outer, views, &mut changes)?;
        let old_values: Vec<Value> =
            changes.iter().filter_map(|(old, _)| if let Known::Value(old) = old { Some(*old) } else { None }).collect();
        if node.region.no_gradients && old_values.into_iter().any(|old| self.has_gradient(old)) {
            return Err(LowerReason::Unsupported(
                "an in-place change under no_grad of a tensor that requires a gradient".to_string(),
            ));
        }
        for name in &views.members[class] {
            if let Some(known) = outer.tensors.get_mut(name) {
                let change = changes.iter().find(|(old, _)| old == known);
                *known = change.map_or(CHANGED, |(_, new)| *new);
            }
        }
        Ok(Known::Value(value))
    }

    /// Writes a view's new elements into its bases, nearest first, as far as the views can be inverted. Appends the old
    /// and new value of each base to `changes`.
    fn write_back(
        &mut self,
        view: &str,
        mut view_value: Value,
        outer: &Names,
        views: &Views<'_>,
        changes: &mut Vec<(Known, Known)>,
    ) -> Result<(), LowerReason> {
        let mut name = view;
        for _ in 0..DEEPEST {
            let Some((maker, base)) = views.makers.get(name).copied() else { break };
            let Some(Known::Value(old)) = outer.tensors.get(base).copied() else { break };
            if maker.outputs.iter().flat_map(names).count() != 1 {
                break;
            }
            let mut scope = self.scope(maker, outer);
            let Some(base_value) = in_place::write_view(&mut scope, old, view_value)? else { break };
            if !changes.iter().any(|(known, _)| *known == Known::Value(old)) {
                changes.push((Known::Value(old), Known::Value(base_value)));
            }
            (name, view_value) = (base, base_value);
        }
        Ok(())
    }

    /// Compares a result with the type and shape in the file, if those are known.
    fn compare(&self, name: &str, known: Known) -> Result<(), LowerReason> {
        let Known::Value(value) = known else { return Ok(()) };
        let Some(declared) = self.declared(name) else { return Ok(()) };
        let (computed, declared) =
            (self.graph.fact(value).substitute(self.frozen)?, declared.substitute(&self.bindings)?);
        if computed == declared {
            return Ok(());
        }
        computed.shape.iter().zip(&declared.shape).try_for_each(|(one, other)| agree(one, other))?;
        Err(LowerReason::Inputs(format!("its result would be {computed}, but the file declares {declared}")))
    }

    fn finish(mut self, outer: &Names) -> Result<Lowered, LowerError> {
        let error =
            |name: &str, reason: LowerReason| LowerError::Output { name: name.to_string(), reason: Box::new(reason) };
        let empty = empty_node();
        for (output, name) in &self.program.outputs {
            let known = outer.tensors.get(name).copied().unwrap_or(CHANGED);
            let value = self.scope(&empty, outer).read(known).map_err(|reason| error(output, reason))?;
            self.graph.outputs.push(Output { name: output.clone(), value });
        }
        if self.graph.outputs.is_empty() {
            return Err(LowerError::NoOutputs);
        }
        for (value, target) in &self.program.mutations {
            self.mutation(outer, value, target).map_err(|reason| error(value, reason))?;
        }
        // A joint graph always uses batch statistics, as its gradients do.
        if !self.program.joint {
            self.statistics_are_not_read()?;
            self.graph.averages = std::mem::take(&mut self.ledger.averages);
        }
        detach::settle(&mut self.graph);
        let graph = prune(&self.graph)?;
        let weights = used_weights(&graph, self.ledger.weights);
        let mut warnings = self.ledger.warnings;
        if let Some(first) = self.ledger.stored_statistics.first() {
            warnings.push(format!(
                "{} batch normalisations, such as `{}`, use stored statistics instead of batch statistics; PyTorch \
                 trains a different model; call model.train() before the export",
                self.ledger.stored_statistics.len(),
                short_name(first)
            ));
        }
        Ok(Lowered { graph, weights, warnings, constants: Vec::new() })
    }

    /// Refuses a model that reads a running statistic: nodes behind the batch normalisation would read the new value.
    fn statistics_are_not_read(&self) -> Result<(), LowerError> {
        let mut faults = Vec::new();
        for average in &self.ledger.averages {
            let is_own = |weight: &Weight| weight.state.is_some_and(|state| state.node == average.state);
            let Some(at) = self.ledger.weights.iter().position(is_own) else { continue };
            let name = short_name(&self.ledger.weights[at].name);
            let reads = format!("reading `{name}`, which a batch normalisation updates,");
            faults.extend(self.readers(at).map(|reader| {
                let node = self.graph.node(reader);
                Fault {
                    node: node.label().to_string(),
                    operator: rule(&node.op).name().to_string(),
                    module: node.origin.module.clone(),
                    line: String::new(),
                    reason: LowerReason::Unsupported(reads.clone()),
                }
            }));
        }
        if faults.is_empty() { Ok(()) } else { Err(LowerError::Nodes(Faults(faults))) }
    }

    /// The nodes that read a weight.
    fn readers(&self, at: usize) -> impl Iterator<Item = NodeId> {
        let values = [self.ledger.weights[at].state, self.constants.get(&at).copied()];
        values.into_iter().flatten().flat_map(|value| self.graph.consumers(value)).map(|(reader, _)| reader)
    }

    /// Checks that a buffer mutation is a running average or a counter.
    fn mutation(&self, outer: &Names, value: &str, target: &str) -> Result<(), LowerReason> {
        match outer.tensors.get(value) {
            // A running statistic, described by [`Graph::averages`].
            Some(Known::Absent(_) | Known::Weight(_)) | None => Ok(()),
            Some(Known::Complex(..)) => {
                Err(LowerReason::Unsupported(format!("an in-place change of `{}`", short_name(target))))
            }
            Some(Known::Value(value)) => {
                let fact = self.graph.fact(*value);
                let at = self.ledger.weights.iter().position(|weight| weight.name == target);
                let readers = self.graph.consumers(*value).into_iter().map(|(reader, _)| reader);
                let is_read = readers.chain(at.into_iter().flat_map(|at| self.readers(at))).any(|id| id != value.node);
                match fact.dtype.is_integer() && fact.rank() == 0 && !is_read {
                    true => Ok(()),
                    false => Err(LowerReason::Unsupported(format!("an in-place change of `{}`", short_name(target)))),
                }
            }
        }
    }
}

fn without_gradients(scope: &mut Scope<'_>, outputs: NodeOutputs) -> Result<NodeOutputs, LowerReason> {
    let NodeOutputs::Tensors(mut list) = outputs else { return Ok(outputs) };
    for known in list.iter_mut().filter(|known| !matches!(known, Known::Absent(_))) {
        *known = match *known {
            Known::Complex(re, im) => Known::Complex(scope.stop_gradient(re)?, scope.stop_gradient(im)?),
            known => {
                let value = scope.read(known)?;
                Known::Value(scope.stop_gradient(value)?)
            }
        };
    }
    Ok(NodeOutputs::Tensors(list))
}

/// A placeholder node for ops that belong to no node.
fn empty_node() -> schema::Node {
    let (metadata, region) = <(schema::Metadata, schema::Region)>::default();
    schema::Node { target: String::new(), inputs: Vec::new(), outputs: Vec::new(), metadata, name: None, region }
}

/// Tests whether the node stops gradients. `run_decompositions` removes `no_grad` regions and `detach`; only the
/// recorded Python function remains.
fn stops_gradient(node: &schema::Node) -> bool {
    let from = node.metadata.torch_fn.as_deref().unwrap_or_default();
    let (call, kind) = from.split_once(';').unwrap_or((from, ""));
    call.starts_with("wrap_with_set_grad_enabled")
        || (table::name(&node.target) == "alias" && kind.rsplit('.').next() == Some("detach"))
}
