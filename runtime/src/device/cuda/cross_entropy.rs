//! Mean cross-entropy and its gradient: one block per target, then one for the mean.

use super::draft::KernelBuilder;
use super::element::{accumulator, compute_type, load, store};
use super::launch_plan::{At, Base, Launch, LaunchPlan};
use super::rows::Written;
use super::softmax::{most_and_total, operand, rows_of};
use crate::device::layout::TensorLayout;
use compiler::op::{CrossEntropy, CrossEntropyGrad};
use compiler::tensor::DType;

/// C++ condition that label `t` is not ignored.
fn is_counted_condition(ignore: Option<i64>) -> String {
    match ignore {
        // The minimum i64 has no literal of its own.
        Some(label) => format!("(t != (i64){}ull)", label as u64),
        None => "true".to_string(),
    }
}

/// One block that counts targets. A label outside the classes sets the fault cell; the first one wins.
fn count_targets(target: &TensorLayout, input: usize, classes: usize, ignore: Option<i64>, to: At) -> Launch {
    let mut builder = KernelBuilder::new(target.len());
    builder.add_input("target", target.dtype, At::input(input));
    builder.add_output("count", DType::U64, to);
    builder.add_fault(At { base: Base::Fault, offset: 0 });
    let lines = format!(
        "u64 counted = 0, wrong = ~0ull;\n\
         for (at k = threadIdx.x; k < (at){}; k += blockDim.x) {{\ni64 t = (i64){};\nif (!{}) continue;\ncounted++;\n\
         if ((u64)t >= (u64){classes} && k < wrong) wrong = k;\n}}\n\
         counted = sum_across(counted);\nwrong = across(wrong, [](u64 a, u64 b) {{ return a < b ? a : b; }});\n\
         if (threadIdx.x == 0) {{\ncount[0] = counted;\n\
         if (wrong != ~0ull && fault->kind == 0) {{ fault->kind = 2; fault->value = (i64){}; fault->size = {classes}; }}\n}}",
        target.len(),
        load(target.dtype, "target[k]"),
        is_counted_condition(ignore),
        load(target.dtype, "target[wrong]"),
    );
    builder.block_each(1, target.len(), &lines)
}

/// Outputs the loss and the log-sum-exp of every row, in type `results`.
pub fn kernel(op: &CrossEntropy, logits: &TensorLayout, target: &TensorLayout, results: DType) -> Option<LaunchPlan> {
    let (size, inner) = (logits.shape[op.axis], logits.shape[op.axis + 1..].iter().product::<usize>());
    let (rows, from) = rows_of(logits, op.axis);
    let sums = accumulator(logits.dtype);
    let kind = compute_type(sums);
    let mut launch_plan = LaunchPlan::default();
    let target_count = launch_plan.take(8);
    let losses = launch_plan.take(target.len() * sums.size());
    launch_plan.launches.push(count_targets(target, 1, size, op.ignore, target_count));
    let mut builder = KernelBuilder::new(logits.len());
    builder.add_input("x", logits.dtype, At::input(0));
    builder.add_input("target", target.dtype, At::input(1));
    builder.add_output("lse", results, At::output(1));
    builder.add_output("losses", sums, losses);
    let lines = format!(
        "{from}{}\
         if (threadIdx.x == 0) {{\n{kind} l = most + m_log(total);\nlse[i] = {};\ni64 t = (i64){};\n\
         losses[i] = {} && (u64)t < (u64){size} ? l - {} : ({kind})0;\n}}",
        most_and_total(logits.dtype, &rows),
        store(results, "l"),
        load(target.dtype, "target[i]"),
        is_counted_condition(op.ignore),
        load(logits.dtype, &format!("x[from + (at)t * (at){inner}]"))
    );
    launch_plan.launches.push(builder.rows_each(target.len(), &rows, &lines));
    let mut builder = KernelBuilder::new(target.len());
    builder.add_input("losses", sums, losses);
    builder.add_input("count", DType::U64, target_count);
    builder.add_output("loss", results, At::output(0));
    let lines = format!(
        "{kind} sum = 0;\nfor (at k = threadIdx.x; k < (at){}; k += blockDim.x) sum += losses[k];\nsum = sum_across(sum);\n\
         if (threadIdx.x == 0) loss[0] = {};",
        target.len(),
        store(results, &format!("sum / ({kind})(count[0] > 0 ? count[0] : 1)"))
    );
    launch_plan.launches.push(builder.block_each(1, target.len(), &lines));
    Some(launch_plan)
}

pub fn grad(
    op: &CrossEntropyGrad,
    dloss: &TensorLayout,
    logits: &TensorLayout,
    target: &TensorLayout,
) -> Option<LaunchPlan> {
    let (size, inner) = (logits.shape[op.axis], logits.shape[op.axis + 1..].iter().product::<usize>());
    let kind = compute_type(accumulator(logits.dtype));
    let mut launch_plan = LaunchPlan::default();
    let target_count = launch_plan.take(8);
    launch_plan.launches.push(count_targets(target, 2, size, op.ignore, target_count));
    let mut builder = KernelBuilder::new(logits.len());
    builder.add_input("dloss", dloss.dtype, At::input(0));
    builder.add_input("x", logits.dtype, At::input(1));
    builder.add_input("target", target.dtype, At::input(2));
    builder.add_input("lse", dloss.dtype, At::input(3));
    builder.add_input("count", DType::U64, target_count);
    builder.add_output("y", logits.dtype, At::output(0));
    let row_code = |row: &str| {
        let (t, lse) = (load(target.dtype, &format!("target[{row}]")), load(dloss.dtype, &format!("lse[{row}]")));
        let (dloss, is_counted) = (load(dloss.dtype, "dloss[0]"), is_counted_condition(op.ignore));
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
        launch_plan.launches.push(builder.rows_each(target.len(), &rows, &format!("{from}{}{pass}", row_code("i"))));
        return Some(launch_plan);
    }
    let lines = format!(
        "at within = i % (at){inner}, class_of = i / (at){inner} % (at){size}, line = i / (at){} * (at){inner} + within;\n\
         {}y[i] = {};",
        size * inner,
        row_code("line"),
        value(&load(logits.dtype, "x[i]"), "class_of"),
    );
    launch_plan.launches.push(builder.each(logits.len(), &lines));
    Some(launch_plan)
}
