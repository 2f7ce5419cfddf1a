//! Slices picked by indices, and slices written where indices say.
//!
//! Slices that meet in one place are joined in the order of their indices: each place knows the first index that names it, each index the
//! next one that names the same place, and a thread for each element goes along this chain.

use super::draft::{Draft, threads_for};
use super::element::{accumulator, bits, held, load, store};
use super::recipe::{At, Base, Launch, Recipe};
use crate::device::layout::Layout;
use compiler::op::{Gather, Scatter, ScatterAdd, ScatterKind};
use compiler::tensor::DType;

/// The row that index `k` names, below `size`; an index outside names `~0`.
fn row(indices: &Layout, size: usize, k: &str) -> String {
    let element = load(indices.dtype, &format!("indices[{k}]"));
    match indices.dtype {
        DType::U64 => format!("({element} < (u64){size} ? (at){element} : ~(at)0)"),
        _ => format!(
            "((u64)(i64){element} < (u64){size} ? (at){element} : (i64){element} < 0 && (i64){element} >= -(i64){size} ? (at)((i64){element} + (i64){size}) : ~(at)0)"
        ),
    }
}

/// One block that refuses the first index outside.
fn check(indices: &Layout, input: usize, size: usize) -> Launch {
    let mut draft = Draft::new(indices.len().max(size));
    draft.reads("indices", indices.dtype, At::input(input));
    draft.faults(At { base: Base::Fault, offset: 0 });
    let lines = format!(
        "u64 wrong = ~0ull;\nfor (at k = threadIdx.x; k < (at){}; k += blockDim.x) if ({} == ~(at)0 && k < wrong) wrong = k;\n\
         wrong = across(wrong, [](u64 a, u64 b) {{ return a < b ? a : b; }});\n\
         if (threadIdx.x == 0 && wrong != ~0ull && fault->kind == 0) {{ fault->kind = 1; fault->value = (i64){}; fault->size = {size}; }}",
        indices.len(),
        row(indices, size, "k"),
        load(indices.dtype, "indices[wrong]"),
    );
    draft.block_each(1, indices.len(), &lines)
}

/// Slices of x.
pub fn gather(op: &Gather, x: &Layout, indices: &Layout, y: &Layout) -> Option<Recipe> {
    let (size, run) = (x.shape[op.axis], x.shape[op.axis + 1..].iter().product::<usize>());
    let dtype = bits(x.dtype);
    let mut draft = Draft::new(x.len().max(y.len()));
    draft.reads("x", dtype, At::input(0));
    draft.reads("indices", indices.dtype, At::input(1));
    draft.writes("y", dtype, At::output(0));
    let lines = format!(
        "at within = i % (at){run}, k = i / (at){run} % (at){count}, block = i / (at){};\nat place = {};\n\
         y[i] = place == ~(at)0 ? 0 : x[(block * (at){size} + place) * (at){run} + within];",
        run * indices.len(),
        row(indices, size, "k"),
        count = indices.len(),
    );
    Some(Recipe { launches: vec![check(indices, 1, size), draft.each(y.len(), &lines)], scratch: 0 })
}

/// The chains: `first` of each place and `next` of each index, `~0` where there is none.
fn chains(recipe: &mut Recipe, indices: &Layout, size: usize) -> (At, At) {
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
        row(indices, size, "i"),
        row(indices, size, "k"),
    );
    recipe.launches.push(draft.block_each(count, threads_for(count) as usize, &lines));
    (first, next)
}

/// Slices of `dy` added where they came from.
pub fn scatter_add(op: &ScatterAdd, dy: &Layout, indices: &Layout, y: &Layout) -> Option<Recipe> {
    join(op.axis, ScatterKind::Add, None, (At::input(0), dy), indices, y)
}

/// Slices of the third input joined with those of the first.
pub fn scatter(op: &Scatter, indices: &Layout, updates: &Layout, y: &Layout) -> Option<Recipe> {
    join(op.axis, op.kind, Some(At::input(0)), (At::input(2), updates), indices, y)
}

fn join(
    axis: usize,
    kind: ScatterKind,
    x: Option<At>,
    updates: (At, &Layout),
    indices: &Layout,
    y: &Layout,
) -> Option<Recipe> {
    let (size, run) = (y.shape[axis], y.shape[axis + 1..].iter().product::<usize>());
    let mut recipe = Recipe::default();
    recipe.launches.push(check(indices, 1, size));
    let (first, next) = chains(&mut recipe, indices, size);
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
