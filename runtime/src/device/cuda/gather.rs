//! Slices picked by indices, and slices written where indices say.
//!
//! Slices that meet in one place are joined in the order of their indices: each place knows the first index that names it, each index the
//! next one that names the same place, and a thread for each element goes along this chain.

use super::draft::{Draft, threads_for};
use super::element::{accumulator, bits, held, load, store};
use super::recipe::{At, Base, Launch, LaunchPlan};
use crate::device::layout::TensorLayout;
use compiler::op::{BatchGather, BatchScatterAdd, Gather, Scatter, ScatterAdd, ScatterKind};
use compiler::tensor::DType;

/// What indices name: rows of one axis, or of an axis for each example of a batch, one behind the other.
#[derive(Clone, Copy)]
struct Rows<'a> {
    indices: &'a TensorLayout,
    /// Rows of an axis.
    size: usize,
    /// How many examples have an axis and indices of their own.
    examples: usize,
}

impl Rows<'_> {
    fn count(&self) -> usize {
        self.size * self.examples
    }

    /// The row that index `k` names, below [`Rows::count`]; an index outside names `~0`.
    fn row(&self, k: &str) -> String {
        let (dtype, size) = (self.indices.dtype, self.size);
        let element = load(dtype, &format!("indices[{k}]"));
        let first = match self.examples {
            0 | 1 => String::new(),
            examples => format!(" + {k} / (at){} * (at){size}", self.indices.len() / examples),
        };
        match dtype {
            DType::U64 => format!("({element} < (u64){size} ? (at){element}{first} : ~(at)0)"),
            _ => format!(
                "((u64)(i64){element} < (u64){size} ? (at){element}{first} : (i64){element} < 0 && (i64){element} >= -(i64){size} ? (at)((i64){element} + (i64){size}){first} : ~(at)0)"
            ),
        }
    }
}

/// One block that refuses the first index outside.
fn check(rows: Rows<'_>, input: usize) -> Launch {
    let Rows { indices, size, .. } = rows;
    let mut draft = Draft::new(indices.len().max(rows.count()));
    draft.reads("indices", indices.dtype, At::input(input));
    draft.faults(At { base: Base::Fault, offset: 0 });
    let lines = format!(
        "u64 wrong = ~0ull;\nfor (at k = threadIdx.x; k < (at){}; k += blockDim.x) if ({} == ~(at)0 && k < wrong) wrong = k;\n\
         wrong = across(wrong, [](u64 a, u64 b) {{ return a < b ? a : b; }});\n\
         if (threadIdx.x == 0 && wrong != ~0ull && fault->kind == 0) {{ fault->kind = 1; fault->value = (i64){}; fault->size = {size}; }}",
        indices.len(),
        rows.row("k"),
        load(indices.dtype, "indices[wrong]"),
    );
    draft.block_each(1, indices.len(), &lines)
}

/// Slices of x.
pub fn gather(op: &Gather, x: &TensorLayout, indices: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let (size, run) = (x.shape[op.axis], x.shape[op.axis + 1..].iter().product::<usize>());
    let rows = Rows { indices, size, examples: 1 };
    let dtype = bits(x.dtype);
    let mut draft = Draft::new(x.len().max(y.len()));
    draft.reads("x", dtype, At::input(0));
    draft.reads("indices", indices.dtype, At::input(1));
    draft.writes("y", dtype, At::output(0));
    let lines = format!(
        "at within = i % (at){run}, k = i / (at){run} % (at){count}, block = i / (at){};\nat place = {};\n\
         y[i] = place == ~(at)0 ? 0 : x[(block * (at){size} + place) * (at){run} + within];",
        run * indices.len(),
        rows.row("k"),
        count = indices.len(),
    );
    Some(LaunchPlan { launches: vec![check(rows, 1), draft.each(y.len(), &lines)], scratch: 0 })
}

/// Slices of x by indices of their own for each example.
pub fn batch_gather(
    op: &BatchGather,
    x: &TensorLayout,
    indices: &TensorLayout,
    y: &TensorLayout,
) -> Option<LaunchPlan> {
    let (size, run) = (x.shape[op.batch], x.shape[op.batch + 1..].iter().product::<usize>());
    let rows = Rows { indices, size, examples: x.shape[..op.batch].iter().product() };
    let dtype = bits(x.dtype);
    let mut draft = Draft::new(x.len().max(y.len()));
    draft.reads("x", dtype, At::input(0));
    draft.reads("indices", indices.dtype, At::input(1));
    draft.writes("y", dtype, At::output(0));
    let lines = format!(
        "at within = i % (at){run}, k = i / (at){run};\nat place = {};\n\
         y[i] = place == ~(at)0 ? 0 : x[place * (at){run} + within];",
        rows.row("k"),
    );
    Some(LaunchPlan { launches: vec![check(rows, 1), draft.each(y.len(), &lines)], scratch: 0 })
}

/// The chains: `first` of each place and `next` of each index, `~0` where there is none.
fn chains(recipe: &mut LaunchPlan, rows: Rows<'_>) -> (At, At) {
    let (indices, size) = (rows.indices, rows.count());
    let (first, next) = (recipe.take(size * 8), recipe.take(indices.len() * 8));
    let mut draft = Draft::new(size);
    draft.writes("first", DType::U64, first);
    recipe.launches.push(draft.each(size, "first[i] = ~0ull;"));
    let mut draft = Draft::new(indices.len().max(size));
    draft.reads("indices", indices.dtype, At::input(1));
    draft.writes("first", DType::U64, first);
    draft.writes("next", DType::U64, next);
    // A block looks for the nearest neighbours of its index that name the same place.
    let count = indices.len();
    let lines = format!(
        "at place = {};\nu64 before = ~0ull, behind = ~0ull;\n\
         for (at k = threadIdx.x; k < (at){count}; k += blockDim.x) {{\nif (k == i || {} != place) continue;\n\
         if (k < i) before = k; else if (behind == ~0ull) behind = k;\n}}\n\
         before = across(before, [](u64 a, u64 b) {{ return a < b ? a : b; }});\n\
         behind = across(behind, [](u64 a, u64 b) {{ return a < b ? a : b; }});\n\
         if (threadIdx.x == 0) {{ next[i] = behind; if (before == ~0ull && place != ~(at)0) first[place] = i; }}",
        rows.row("i"),
        rows.row("k"),
    );
    recipe.launches.push(draft.block_each(count, threads_for(count) as usize, &lines));
    (first, next)
}

/// Slices of `dy` added where they came from.
pub fn scatter_add(op: &ScatterAdd, dy: &TensorLayout, indices: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let rows = Rows { indices, size: y.shape[op.axis], examples: 1 };
    join(rows, y.shape[op.axis + 1..].iter().product(), ScatterKind::Add, None, (At::input(0), dy), y)
}

/// Slices of `dy` added where they came from, by indices of their own for each example.
pub fn batch_scatter_add(
    op: &BatchScatterAdd,
    dy: &TensorLayout,
    indices: &TensorLayout,
    y: &TensorLayout,
) -> Option<LaunchPlan> {
    let rows = Rows { indices, size: y.shape[op.batch], examples: y.shape[..op.batch].iter().product() };
    join(rows, y.shape[op.batch + 1..].iter().product(), ScatterKind::Add, None, (At::input(0), dy), y)
}

/// Slices of the third input joined with those of the first.
pub fn scatter(op: &Scatter, indices: &TensorLayout, updates: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let rows = Rows { indices, size: y.shape[op.axis], examples: 1 };
    join(rows, y.shape[op.axis + 1..].iter().product(), op.kind, Some(At::input(0)), (At::input(2), updates), y)
}

fn join(
    rows: Rows<'_>,
    run: usize,
    kind: ScatterKind,
    x: Option<At>,
    updates: (At, &TensorLayout),
    y: &TensorLayout,
) -> Option<LaunchPlan> {
    let (indices, size) = (rows.indices, rows.count());
    let mut recipe = LaunchPlan::default();
    recipe.launches.push(check(rows, 1));
    let (first, next) = chains(&mut recipe, rows);
    let value = match y.dtype {
        d if d.is_float() => held(accumulator(d)),
        DType::Bool if kind != ScatterKind::Replace => "i64",
        d => held(d),
    };
    let mut draft = Draft::new(updates.1.len().max(y.len()));
    if let Some(x) = x {
        draft.reads("x", y.dtype, x);
    }
    draft.reads("updates", y.dtype, updates.0);
    draft.reads("first", DType::U64, first);
    draft.reads("next", DType::U64, next);
    draft.writes("y", y.dtype, At::output(0));
    let start = if x.is_some() { load(y.dtype, "x[i]") } else { "0".to_string() };
    let joined = match kind {
        ScatterKind::Replace => "b",
        ScatterKind::Add => "a + b",
        ScatterKind::Mul => "a * b",
        ScatterKind::Max => "m_max(a, b)",
        ScatterKind::Min => "m_min(a, b)",
    };
    let lines = format!(
        "at within = i % (at){run}, place = i / (at){run} % (at){size}, block = i / (at){};\n{value} a = ({value}){start};\n\
         for (u64 k = first[place]; k != ~0ull; k = next[k]) {{\n\
         {value} b = ({value}){};\na = {joined};\n}}\ny[i] = {};",
        run * size,
        load(y.dtype, &format!("updates[(block * (at){} + (at)k) * (at){run} + within]", indices.len())),
        store(y.dtype, "a")
    );
    recipe.launches.push(draft.each(y.len(), &lines));
    Some(recipe)
}
