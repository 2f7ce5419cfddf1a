//! Layer normalisation: one block per row. In the backward a block has several rows, and sums the gradients of scale and
//! bias over them; a second launch adds these sums.

use super::draft::{KernelBuilder, THREADS};
use super::element::{accumulator, compute_type, load, store};
use super::launch_plan::{At, Launch, LaunchPlan};
use super::rows::{Read, Rows, Written};
use super::tail::Tail;
use crate::device::chain::Link;
use crate::device::layout::TensorLayout;
use compiler::op::LayerNorm;
use compiler::tensor::DType;

/// Most blocks of a backward, each with sums of its own.
const MOST_SUMS: usize = 512;

/// Columns of a block that adds these sums.
const COLUMNS: usize = 8;

/// Outputs y, mean and reciprocal standard deviation.
pub fn kernel(op: &LayerNorm, x: &TensorLayout, scale: &TensorLayout) -> Option<LaunchPlan> {
    let size: usize = x.shape[op.axis..].iter().product();
    let kind = compute_type(accumulator(x.dtype));
    let mut builder = KernelBuilder::new(x.len());
    // Scale, bias and statistics may have another type than x.
    let of = scale.dtype;
    for (i, (name, dtype)) in [("x", x.dtype), ("scale", of), ("bias", of)].into_iter().enumerate() {
        builder.add_input(name, dtype, At::input(i));
    }
    for (i, (name, dtype)) in [("y", x.dtype), ("means", of), ("rstds", of)].into_iter().enumerate() {
        builder.add_output(name, dtype, At::output(i));
    }
    let rows = Rows::new(size, 1, x.dtype.size());
    let row = || Read { name: "x", dtype: x.dtype, from: "from", is_kept: true };
    let [scale, bias] = ["scale", "bias"].map(|name| Read { name, dtype: of, from: "0", is_kept: false });
    let y = Written { name: "y", dtype: x.dtype, from: "from" };
    let lines = format!(
        "at from = i * (at){size};\n{kind} sum = 0;\n{}{kind} mean = sum_across(sum) / ({kind}){size};\nsum = 0;\n{}\
         {kind} rstd = ({kind})1 / m_sqrt(sum_across(sum) / ({kind}){size} + ({kind}){epsilon:?});\n\
         if (threadIdx.x == 0) {{ means[i] = {}; rstds[i] = {}; }}\n{}",
        rows.pass(true, &[row()], &[], "sum += x_k;"),
        rows.pass(false, &[row()], &[], &format!("{kind} d = x_k - mean;\nsum += d * d;")),
        store(of, "mean"),
        store(of, "rstd"),
        rows.pass(
            false,
            &[row(), scale, bias],
            &[y],
            &format!("y_k = {};", store(x.dtype, "(x_k - mean) * rstd * scale_k + bias_k"))
        ),
        epsilon = op.epsilon,
    );
    Some(LaunchPlan::of(builder.rows_each(x.len() / size, &rows, &lines)))
}

/// Outputs dx, dscale and dbias.
pub fn grad(x: &TensorLayout, scale: &TensorLayout) -> LaunchPlan {
    with([x, scale], &Tail::none(x.dtype, 2))
}

/// A backward and the elementwise ops after it.
pub fn grad_chain(links: &[Link], inputs: &[TensorLayout]) -> Option<LaunchPlan> {
    let [_, x, scale, ..] = inputs else { return None };
    Some(with([x, scale], &Tail::of(links, inputs, 5, &[(0, "dy"), (1, "x")])?))
}

fn with([x, scale]: [&TensorLayout; 2], tail: &Tail) -> LaunchPlan {
    let size = scale.len();
    let count = x.len() / size;
    let blocks = count.min(MOST_SUMS);
    let sums = accumulator(x.dtype);
    let kind = compute_type(sums);
    let mut launch_plan = LaunchPlan::default();
    let partials = ["scale_sums", "bias_sums"].map(|name| (name, launch_plan.take(blocks * size * sums.size())));
    let mut builder = KernelBuilder::new(x.len());
    for (i, name) in ["dy", "x", "scale", "means", "rstds"].into_iter().enumerate() {
        builder.add_input(name, if i < 2 { x.dtype } else { scale.dtype }, At::input(i));
    }
    tail.declare(&mut builder);
    let rows = Rows::new(size, 1, x.dtype.size().max(sums.size()));
    for (name, at) in partials {
        builder.add_output(name, sums, at);
        builder.add(&rows.cells(&format!("{name}_own"), kind, "0").unwrap_or_default());
    }
    let [mean, rstd] = ["means[i]", "rstds[i]"].map(|e| load(scale.dtype, e));
    let reads = || {
        let row = |name| Read { name, dtype: x.dtype, from: "from", is_kept: true };
        [row("dy"), row("x"), Read { name: "scale", dtype: scale.dtype, from: "0", is_kept: false }]
    };
    // Rows that do not fit have their sums in memory.
    let of_block = |name: &str| match rows.fit() {
        true => rows.cell(&format!("{name}_own")),
        false => format!("{name}[(at)blockIdx.x * (at){size} + k]"),
    };
    let add = |name: &str, term: &str| match (of_block(name), rows.fit()) {
        (sum, true) => format!("{sum} += {term};\n"),
        (sum, false) => format!("{sum} = (i == blockIdx.x ? ({kind})0 : {sum}) + {term};\n"),
    };
    let first = format!(
        "{kind} x_hat = (x_k - mean) * rstd;\nsum += dy_k * scale_k;\nsum_x += dy_k * scale_k * x_hat;\n{}{}",
        add("scale_sums", "dy_k * x_hat"),
        add("bias_sums", "dy_k")
    );
    let dx = "rstd * (dy_k * scale_k - g - (x_k - mean) * rstd * g_x)";
    builder.add(&format!(
        "for (at i = blockIdx.x; i < (at){count}; i += gridDim.x) {{\nat from = i * (at){size};\n\
         {kind} mean = {mean}, rstd = {rstd}, sum = 0, sum_x = 0;\n{}\
         {kind} g = sum_across(sum) / ({kind}){size}, g_x = sum_across(sum_x) / ({kind}){size};\n{}}}",
        rows.pass(true, &reads(), &[], &first),
        rows.pass(
            false,
            &reads().into_iter().chain(tail.reads("from")).collect::<Vec<_>>(),
            &tail.written("from"),
            &tail.lines("from + k", dx)
        )
    ));
    if rows.fit() {
        let block_offset = format!("(at)blockIdx.x * (at){size}");
        let written = partials.map(|(name, _)| Written { name, dtype: sums, from: &block_offset });
        let lines = partials.map(|(name, _)| format!("{name}_k = {};\n", of_block(name))).concat();
        builder.add(&rows.pass(true, &[], &written, &lines));
    }
    launch_plan.launches.push(builder.launch(blocks, rows.threads));
    let outputs = [0, 1].map(|k| tail.further_result(k));
    launch_plan.launches.push(added(partials.map(|(_, at)| at), outputs, sums, (blocks, size), scale.dtype));
    launch_plan
}

/// Adds the rows of two tables.
fn added(tables: [At; 2], outputs: [At; 2], sums: DType, (count, size): (usize, usize), dtype: DType) -> Launch {
    let kind = compute_type(sums);
    let mut builder = KernelBuilder::new(count * size);
    for (k, (table, output)) in tables.into_iter().zip(outputs).enumerate() {
        builder.add_input(&format!("x{k}"), sums, table);
        builder.add_output(&format!("y{k}"), dtype, output);
    }
    let tiles = size.div_ceil(COLUMNS);
    let lines = format!(
        "at k = i / 2 * {COLUMNS} + threadIdx.x % {COLUMNS};\nconst {kind}* x = i % 2 ? x1 : x0;\n{kind} sum = 0;\n\
         #pragma unroll 8\nfor (at row = k < (at){size} ? threadIdx.x / {COLUMNS} : (at){count}; row < (at){count}; row += {rows}) \
         sum += x[row * (at){size} + k];\n\
         sum = across_rows(sum, {COLUMNS}, []({kind} a, {kind} b) {{ return a + b; }});\n\
         if (k < (at){size} && threadIdx.x < {COLUMNS}) (i % 2 ? y1 : y0)[k] = {};",
        store(dtype, "sum"),
        rows = THREADS as usize / COLUMNS,
    );
    builder.block_each(2 * tiles, THREADS as usize, &lines)
}
