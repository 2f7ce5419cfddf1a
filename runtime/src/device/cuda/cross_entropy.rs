//! Mean cross-entropy and its gradient: one block per target, then one for the mean.

use super::draft::KernelBuilder;
use super::element::{accumulator, held, load, store};
use super::launch_plan::{At, Base, Launch, LaunchPlan};
use super::rows::Written;
use super::softmax::{most_and_total, operand, rows_of};
use crate::device::layout::TensorLayout;
use compiler::op::{CrossEntropy, CrossEntropyGrad};
use compiler::tensor::DType;

/// C++ condition that label `t` is not ignored.
fn counts(ignore: Option<i64>) -> String {
    match ignore {
        // The minimum i64 has no literal of its own.
        Some(label) => format!("(t != (i64){}ull)", label as u64),
        None => "true".to_string(),
    }
}

/// One block that counts targets. A label outside the classes sets the fault cell; the first one wins.
fn count(target: &TensorLayout, input: usize, classes: usize, ignore: Option<i64>, to: At) -> Launch {
    let mut draft = KernelBuilder::new(target.len());
    draft.reads("target", target.dtype, At::input(input));
    draft.writes("count", DType::U64, to);
    draft.faults(At { base: Base::Fault, offset: 0 });
    let lines = format!(
        "u64 counted = 0, wrong = ~0ull;\n\
         for (at k = threadIdx.x; k < (at){}; k += blockDim.x) {{\ni64 t = (i64){};\nif (!{}) continue;\ncounted++;\n\
         if ((u64)t >= (u64){classes} && k < wrong) wrong = k;\n}}\n\
         counted = sum_across(counted);\nwrong = across(wrong, [](u64 a, u64 b) {{ return a < b ? a : b; }});\n\
         if (threadIdx.x == 0) {{\ncount[0] = counted;\n\
         if (wrong != ~0ull && fault->kind == 0) {{ fault->kind = 2; fault->value = (i64){}; fault->size = {classes}; }}\n}}",
        target.len(),
        load(target.dtype, "target[k]"),
        counts(ignore),
        load(target.dtype, "target[wrong]"),
    );
    draft.block_each(1, target.len(), &lines)
}

/// Outputs the loss and the log-sum-exp of every row, in type `results`.
pub fn kernel(op: &CrossEntropy, logits: &TensorLayout, target: &TensorLayout, results: DType) -> Option<LaunchPlan> {
    let (size, inner) = (logits.shape[op.axis], logits.shape[op.axis + 1..].iter().product::<usize>());
    let (rows, from) = rows_of(logits, op.axis);
    let sums = accumulator(logits.dtype);
    let kind = held(sums);
    let mut launch_plan = LaunchPlan::default();
    let counted = launch_plan.take(8);
    let losses = launch_plan.take(target.len() * sums.size());
    launch_plan.launches.push(count(target, 1, size, op.ignore, counted));
    let mut draft = KernelBuilder::new(logits.len());
    draft.reads("x", logits.dtype, At::input(0));
    draft.reads("target", target.dtype, At::input(1));
    draft.writes("lse", results, At::output(1));
    draft.writes("losses", sums, losses);
    let lines = format!(
        "{from}{}\
         if (threadIdx.x == 0) {{\n{kind} l = most + m_log(total);\nlse[i] = {};\ni64 t = (i64){};\n\
         losses[i] = {} && (u64)t < (u64){size} ? l - {} : ({kind})0;\n}}",
        most_and_total(logits.dtype, &rows),
        store(results, "l"),
        load(target.dtype, "target[i]"),
        counts(op.ignore),
        load(logits.dtype, &format!("x[from + (at)t * (at){inner}]"))
    );
    launch_plan.launches.push(draft.rows_each(target.len(), &rows, &lines));
    let mut draft = KernelBuilder::new(target.len());
    draft.reads("losses", sums, losses);
    draft.reads("count", DType::U64, counted);
    draft.writes("loss", results, At::output(0));
    let lines = format!(
        "{kind} sum = 0;\nfor (at k = threadIdx.x; k < (at){}; k += blockDim.x) sum += losses[k];\nsum = sum_across(sum);\n\
         if (threadIdx.x == 0) loss[0] = {};",
        target.len(),
        store(results, &format!("sum / ({kind})(count[0] > 0 ? count[0] : 1)"))
    );
    launch_plan.launches.push(draft.block_each(1, target.len(), &lines));
    Some(launch_plan)
}

pub fn grad(
    op: &CrossEntropyGrad,
    dloss: &TensorLayout,
    logits: &TensorLayout,
    target: &TensorLayout,
) -> Option<LaunchPlan> {
    let (size, inner) = (logits.shape[op.axis], logits.shape[op.axis + 1..].iter().product::<usize>());
    let kind = held(accumulator(logits.dtype));
    let mut launch_plan = LaunchPlan::default();
    let counted = launch_plan.take(8);
    launch_plan.launches.push(count(target, 2, size, op.ignore, counted));
    let mut draft = KernelBuilder::new(logits.len());
    draft.reads("dloss", dloss.dtype, At::input(0));
    draft.reads("x", logits.dtype, At::input(1));
    draft.reads("target", target.dtype, At::input(2));
    draft.reads("lse", dloss.dtype, At::input(3));
    draft.reads("count", DType::U64, counted);
    draft.writes("y", logits.dtype, At::output(0));
    let of_row = |row: &str| {
        let (t, lse) = (load(target.dtype, &format!("target[{row}]")), load(dloss.dtype, &format!("lse[{row}]")));
        let (dloss, is_counted) = (load(dloss.dtype, "dloss[0]"), counts(op.ignore));
        format!(
            "i64 t = (i64){t};\nbool is_counted = {is_counted};\n{kind} log_sum = {lse}, slope = {dloss} / ({kind})count[0];\n"
        )
    };
    let value = |x: &str, class: &str| {
        let probability = format!("m_exp({x} - log_sum) - ({kind})((u64)t == (u64){class})");
        store(logits.dtype, &format!("is_counted ? slope * ({probability}) : ({kind})0"))
    };
    if inner == 1 {
        let (rows, from) = rows_of(logits, op.axis);
        let written = [Written { name: "y", dtype: logits.dtype, from: "from" }];
        let pass = rows.pass(true, &[operand(logits.dtype)], &written, &format!("y_k = {};", value("x_k", "k")));
        launch_plan.launches.push(draft.rows_each(target.len(), &rows, &format!("{from}{}{pass}", of_row("i"))));
        return Some(launch_plan);
    }
    let lines = format!(
        "at within = i % (at){inner}, class_of = i / (at){inner} % (at){size}, line = i / (at){} * (at){inner} + within;\n\
         {}y[i] = {};",
        size * inner,
        of_row("line"),
        value(&load(logits.dtype, "x[i]"), "class_of"),
    );
    launch_plan.launches.push(draft.each(logits.len(), &lines));
    Some(launch_plan)
}
