//! Fused elementwise ops, run tile by tile so that intermediates stay in the first-level cache.
//!
//! A tile is a range of outermost rows with about `TILE_ELEMENTS` elements. Every op has its own kernel for the tile
//! shape, so it rounds as when run alone. Broadcast operands are broadcast within the tile.

use super::dropout;
use super::table;
use super::walk::broadcast_strides;
use super::{ALIGNMENT, FastKernel, TensorLayout};
use crate::device::chain::{Link, Operand};
use bytemuck::cast_slice;
use compiler::op::{KernelError, Op};
use compiler::pass::fuse::{MOST_READ, MOST_WRITTEN};

/// Elements per tile: a few tensors of it fit into the first-level cache.
const TILE_ELEMENTS: usize = 2048;
/// Maximum dimensions outside a tile, after merging.
const MOST_OUTER: usize = 8;
/// Maximum live intermediates of a tile.
const MOST_SLOTS: usize = 8;
/// Maximum operands of an op.
const MOST_OPERANDS: usize = 3;

/// A chain at concrete shapes.
pub struct Chain {
    inputs: Vec<ChainInput>,
    outputs: Vec<TensorLayout>,
    steps: Vec<Step>,
    /// Merged dimensions outside a tile; `rows` is the dimension split into tiles.
    outer: Vec<usize>,
    rows: usize,
    /// Rows per tile, and elements per row.
    height: usize,
    width: usize,
    slots: usize,
    slot_bytes: usize,
    /// The largest workspace of a kernel.
    kernel_bytes: usize,
}

/// A chain input and its strides between tiles, in bytes.
struct ChainInput {
    layout: TensorLayout,
    outer: Vec<usize>,
    row: usize,
    /// Bytes of one row, or of the whole tile if rows are broadcast.
    bytes: usize,
}

#[derive(Clone, Copy)]
enum At {
    Input(usize),
    /// An intermediate: slot and bytes per element.
    Slot(usize, usize),
    Output(usize),
}

/// Position of a tile: start byte in each input, first output element, number of rows.
struct TilePosition {
    starts: [usize; MOST_READ],
    first: usize,
    rows: usize,
}

struct Step {
    /// For a full tile and for the last, smaller one.
    kernels: [Option<FastKernel>; 2],
    operands: Vec<At>,
    /// Whether the kernel also reads the number of the first element.
    reads_offset: bool,
    result: At,
}

impl Chain {
    /// `None` if an op has no fast kernel or the shapes are unsuitable.
    pub fn new(links: &[Link], inputs: &[TensorLayout]) -> Option<Chain> {
        let shape = &links.first()?.result.shape;
        let outputs: Vec<TensorLayout> = links.iter().filter(|l| l.is_written).map(|l| l.result.clone()).collect();
        let is_small = inputs.len() <= MOST_READ && outputs.len() <= MOST_WRITTEN && !shape.contains(&0);
        if !is_small || links.iter().any(|l| l.result.shape != *shape || l.operands.len() > MOST_OPERANDS) {
            return None;
        }
        let strides: Vec<Vec<isize>> = inputs.iter().map(|layout| broadcast_strides(&layout.shape, shape)).collect();
        let (dims, strides) = merge_dims(shape, &strides);
        let tile_axis = (0..dims.len()).find(|&axis| dims[axis + 1..].iter().product::<usize>() <= TILE_ELEMENTS)?;
        if tile_axis > MOST_OUTER {
            return None;
        }
        let width: usize = dims[tile_axis + 1..].iter().product();
        let height = (TILE_ELEMENTS / width).clamp(1, dims[tile_axis]);
        // Shape of an input within a tile of `rows` rows.
        let input_shape = |of: usize, rows: usize| -> Vec<usize> {
            let size = |axis: usize| if axis == tile_axis { rows } else { dims[axis] };
            (tile_axis..dims.len()).map(|axis| if strides[of][axis] == 0 { 1 } else { size(axis) }).collect()
        };
        let tile_shape = |rows: usize| [&[rows][..], &dims[tile_axis + 1..]].concat();
        let chain_inputs = inputs.iter().zip(&strides).enumerate().map(|(of, (layout, strides))| {
            let stride = |axis: usize| strides[axis] as usize * layout.dtype.size();
            let bytes = input_shape(of, 1).iter().product::<usize>() * layout.dtype.size();
            ChainInput {
                layout: layout.clone(),
                outer: (0..tile_axis).map(stride).collect(),
                row: stride(tile_axis),
                bytes,
            }
        });
        let chain_inputs: Vec<ChainInput> = chain_inputs.collect();
        let (locations, slots) = assign_slots(links)?;
        let mut steps = Vec::new();
        for (link, result) in links.iter().zip(&locations) {
            let kernel = |rows: usize| {
                let layout = |operand: &Operand| match *operand {
                    Operand::Input(i) => TensorLayout { dtype: inputs[i].dtype, shape: input_shape(i, rows) },
                    Operand::Result(i) => TensorLayout { dtype: links[i].result.dtype, shape: tile_shape(rows) },
                };
                let operands: Vec<TensorLayout> = link.operands.iter().map(layout).collect();
                let result = TensorLayout { dtype: link.result.dtype, shape: tile_shape(rows) };
                match &link.op {
                    Op::Dropout(op) => dropout::piece(op, &result),
                    op => table::fast_or_half(op, &operands, &[result]),
                }
            };
            let remainder = dims[tile_axis] % height;
            let kernels = [Some(kernel(height)?), if remainder > 0 { Some(kernel(remainder)?) } else { None }];
            let at = |operand: &Operand| match *operand {
                Operand::Input(i) => At::Input(i),
                Operand::Result(i) => locations[i],
            };
            let operands = link.operands.iter().map(at).collect();
            let reads_offset = matches!(link.op, Op::Dropout(_));
            steps.push(Step { kernels, operands, reads_offset, result: *result });
        }
        let largest = links.iter().map(|l| l.result.dtype.size()).max()?;
        let slot_bytes = (height * width * largest).next_multiple_of(ALIGNMENT);
        let kernel_bytes =
            steps.iter().flat_map(|step| step.kernels.iter().flatten()).map(|fast| fast.workspace).max()?;
        let (outer, rows) = (dims[..tile_axis].to_vec(), dims[tile_axis]);
        Some(Chain {
            inputs: chain_inputs,
            outputs,
            steps,
            outer,
            rows,
            height,
            width,
            slots,
            slot_bytes,
            kernel_bytes,
        })
    }

    pub fn ops(&self) -> usize {
        self.steps.len()
    }

    /// Scratch bytes for [`run`](Chain::run), aligned to [`ALIGNMENT`].
    pub fn workspace(&self) -> usize {
        self.slots * self.slot_bytes + self.kernel_bytes
    }

    /// Runs on aligned row-major buffers. Panics if a buffer length does not match its layout.
    pub fn run(&self, inputs: &[&[u8]], outputs: &mut [&mut [u8]], workspace: &mut [u8]) -> Result<(), KernelError> {
        let lengths = inputs.iter().map(|b| b.len()).chain(outputs.iter().map(|b| b.len()));
        let expected = self.inputs.iter().map(|g| g.layout.bytes()).chain(self.outputs.iter().map(TensorLayout::bytes));
        assert!(lengths.eq(expected), "buffer sizes of a chain do not match their layouts");
        let mut slots: [&mut [u8]; MOST_SLOTS] = Default::default();
        let (slot_memory, kernel_memory) = workspace.split_at_mut(self.slots * self.slot_bytes);
        for (slot, bytes) in slots.iter_mut().zip(slot_memory.chunks_exact_mut(self.slot_bytes)) {
            *slot = bytes;
        }
        let mut at = [0; MOST_READ];
        let mut counters = [0; MOST_OUTER];
        let mut element = 0;
        for _ in 0..self.outer.iter().product::<usize>() {
            for row in (0..self.rows).step_by(self.height) {
                let rows = self.height.min(self.rows - row);
                let mut tile = TilePosition { starts: at, first: element, rows };
                for (start, input) in tile.starts.iter_mut().zip(&self.inputs) {
                    *start += row * input.row;
                }
                self.run_tile(inputs, outputs, &mut slots, kernel_memory, &tile)?;
                element += rows * self.width;
            }
            for axis in (0..self.outer.len()).rev() {
                counters[axis] += 1;
                let wraps = counters[axis] == self.outer[axis];
                for (at, input) in at.iter_mut().zip(&self.inputs) {
                    match wraps {
                        true => *at -= input.outer[axis] * (self.outer[axis] - 1),
                        false => *at += input.outer[axis],
                    }
                }
                if !wraps {
                    break;
                }
                counters[axis] = 0;
            }
        }
        Ok(())
    }

    /// Runs one tile.
    fn run_tile(
        &self,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        slots: &mut [&mut [u8]; MOST_SLOTS],
        kernel_memory: &mut [u8],
        tile: &TilePosition,
    ) -> Result<(), KernelError> {
        let (first, count) = (tile.first, tile.rows * self.width);
        for step in &self.steps {
            // Move the output out so that the other buffers can be borrowed.
            match step.result {
                At::Slot(slot, size) => {
                    let whole = std::mem::take(&mut slots[slot]);
                    let outcome =
                        self.run_step(step, inputs, outputs, slots, tile, (&mut whole[..count * size], kernel_memory));
                    slots[slot] = whole;
                    outcome?;
                }
                At::Output(i) => {
                    let (whole, size) = (std::mem::take(&mut outputs[i]), self.outputs[i].dtype.size());
                    let range = first * size..(first + count) * size;
                    let outcome = self.run_step(step, inputs, outputs, slots, tile, (&mut whole[range], kernel_memory));
                    outputs[i] = whole;
                    outcome?;
                }
                At::Input(_) => unreachable!("a result is not an operand"),
            }
        }
        Ok(())
    }

    fn run_step(
        &self,
        step: &Step,
        inputs: &[&[u8]],
        outputs: &[&mut [u8]],
        slots: &[&mut [u8]; MOST_SLOTS],
        tile: &TilePosition,
        (result, kernel_memory): (&mut [u8], &mut [u8]),
    ) -> Result<(), KernelError> {
        let (first, rows, count) = (tile.first, tile.rows, tile.rows * self.width);
        let kernel = &step.kernels[usize::from(rows < self.height)];
        let Some(FastKernel { body, workspace, .. }) = kernel else {
            unreachable!("there is a kernel for the remaining rows")
        };
        let mut operands: [&[u8]; MOST_OPERANDS] = Default::default();
        for (bytes, operand) in operands.iter_mut().zip(&step.operands) {
            *bytes = match *operand {
                At::Input(i) => {
                    let (input, start) = (&self.inputs[i], tile.starts[i]);
                    &inputs[i][start..start + if input.row == 0 { input.bytes } else { rows * input.bytes }]
                }
                At::Slot(slot, size) => &slots[slot][..count * size],
                At::Output(i) => {
                    let size = self.outputs[i].dtype.size();
                    &outputs[i][first * size..(first + count) * size]
                }
            };
        }
        let (offset, mut count) = ([first as i64], step.operands.len());
        if step.reads_offset {
            operands[count] = cast_slice(&offset);
            count += 1;
        }
        body(&operands[..count], &mut [result], &mut kernel_memory[..*workspace])
    }
}

/// Result locations and the number of slots. A slot is free after the last op that reads it.
fn assign_slots(links: &[Link]) -> Option<(Vec<At>, usize)> {
    let mut last_use: Vec<usize> = (0..links.len()).collect();
    for (at, link) in links.iter().enumerate() {
        for operand in &link.operands {
            if let Operand::Result(result) = *operand {
                last_use[result] = at;
            }
        }
    }
    let mut busy_until: Vec<Option<usize>> = Vec::new();
    let (mut locations, mut outputs) = (Vec::new(), 0);
    for (at, link) in links.iter().enumerate() {
        if link.is_written {
            locations.push(At::Output(outputs));
            outputs += 1;
            continue;
        }
        // Operands of this op are still in use.
        let slot = busy_until.iter().position(|until| until.is_none_or(|until| until < at)).unwrap_or(busy_until.len());
        if slot == busy_until.len() {
            busy_until.push(None);
        }
        busy_until[slot] = Some(last_use[at]);
        locations.push(At::Slot(slot, link.result.dtype.size()));
    }
    (busy_until.len() <= MOST_SLOTS).then_some((locations, busy_until.len()))
}

/// Drops dimensions of size 1 and merges adjacent dimensions that are contiguous for every operand.
fn merge_dims(shape: &[usize], strides: &[Vec<isize>]) -> (Vec<usize>, Vec<Vec<isize>>) {
    let mut dims: Vec<usize> = Vec::new();
    let mut merged: Vec<Vec<isize>> = vec![Vec::new(); strides.len()];
    for (axis, &dim) in shape.iter().enumerate().filter(|&(_, &dim)| dim != 1) {
        let crosses = |(merged_strides, operand): (&Vec<isize>, &Vec<isize>)| {
            merged_strides.last() == Some(&(operand[axis] * dim as isize))
        };
        if !dims.is_empty() && merged.iter().zip(strides).all(crosses) {
            *dims.last_mut().expect("there is a dim above") *= dim;
            for (merged_strides, operand) in merged.iter_mut().zip(strides) {
                *merged_strides.last_mut().expect("there is a dim above") = operand[axis];
            }
        } else {
            dims.push(dim);
            merged.iter_mut().zip(strides).for_each(|(merged_strides, operand)| merged_strides.push(operand[axis]));
        }
    }
    (dims, merged)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::{Kernel, tests};
    use compiler::op::table::rule;
    use compiler::op::{Binary, Cast, Compare, Dropout, Select, Unary};
    use compiler::tensor::fact::Fact;
    use compiler::tensor::{DType, Tensor};

    type Ops = Vec<(Op, Vec<Operand>, bool)>;

    /// Requires equal bytes from the separate ops and the chain.
    fn assert_like_separate_ops(ops: &Ops, layouts: &[TensorLayout], shape: &[usize]) {
        let input = |(i, layout): (usize, &TensorLayout)| {
            let value = |j: usize| ((j * 37 + i * 11) % 101) as f64 / 17.0 - 2.9;
            Tensor::from_f64(&layout.shape, &(0..layout.len()).map(value).collect::<Vec<_>>()).cast(layout.dtype)
        };
        let inputs: Vec<Tensor> = layouts.iter().enumerate().map(input).collect();
        let mut op_results: Vec<Tensor> = Vec::new();
        let mut links = Vec::new();
        for (op, operands, is_written) in ops {
            let tensor = |operand: &Operand| match *operand {
                Operand::Input(i) => &inputs[i],
                Operand::Result(i) => &op_results[i],
            };
            let tensors: Vec<&Tensor> = operands.iter().map(tensor).collect();
            let facts: Vec<Fact> = tensors.iter().map(|tensor| Fact::of(tensor.dtype(), tensor.shape())).collect();
            let outputs = rule(op).infer(&facts.iter().collect::<Vec<_>>()).unwrap();
            let result = TensorLayout::of(&outputs[0]);
            assert_eq!(result.shape, shape);
            let kernel = Kernel::new(op, &facts, &outputs);
            let got = tests::results(
                |i, o, scratch| kernel.run(i, o, scratch),
                kernel.workspace(),
                &tensors,
                std::slice::from_ref(&result),
            );
            op_results.extend(got);
            let (op, operands, is_written) = (op.clone(), operands.clone(), *is_written);
            links.push(Link { op, operands, result, is_written, further_results: Vec::new() });
        }
        let chain = Chain::new(&links, layouts).expect("these shapes suit");
        let written: Vec<TensorLayout> = links.iter().filter(|l| l.is_written).map(|l| l.result.clone()).collect();
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let got = tests::results(|i, o, scratch| chain.run(i, o, scratch), chain.workspace(), &inputs, &written);
        let want = op_results.iter().zip(&links).filter(|(_, link)| link.is_written).map(|(result, _)| result);
        assert!(got.iter().zip(want).all(|(got, want)| got.bytes() == want.bytes()), "{shape:?}");
    }

    #[test]
    fn a_chain_gives_the_bits_of_its_ops() {
        use Operand::{Input, Result};
        let binary = |op, a, b, written| (Op::Binary(op), vec![a, b], written);
        let unary = |op, x, written| (Op::Unary(op), vec![x], written);
        let ops: Ops = vec![
            binary(Binary::Add, Input(0), Input(1), true),
            unary(Unary::Gelu, Result(0), false),
            binary(Binary::Mul, Result(1), Input(2), false),
            (Op::Compare(Compare::Less), vec![Input(3), Result(2)], false),
            (Op::Select(Select {}), vec![Result(3), Result(0), Input(3)], false),
            (Op::Cast(Cast { to: DType::F64 }), vec![Result(4)], false),
            unary(Unary::Tanh, Result(5), true),
            binary(Binary::Sub, Result(2), Result(4), true),
        ];
        let drop = |x, counter| (Op::Dropout(Dropout { ratio: 0.3, stream: 5 }), vec![x, counter], false);
        let dropout_ops: Ops = vec![
            binary(Binary::Add, Input(0), Input(1), false),
            drop(Result(0), Input(2)),
            binary(Binary::Add, Result(1), Input(0), true),
            (Op::Cast(Cast { to: DType::Bf16 }), vec![Result(2)], false),
            drop(Result(3), Input(2)),
            (Op::Cast(Cast { to: DType::F32 }), vec![Result(4)], true),
        ];
        let counter = TensorLayout { dtype: DType::I64, shape: Vec::new() };
        let narrow = |x| (Op::Cast(Cast { to: DType::Bf16 }), vec![x], false);
        let narrow_ops: Ops = vec![
            narrow(Input(0)),
            narrow(Input(1)),
            binary(Binary::Add, Result(0), Result(1), true),
            unary(Unary::Gelu, Result(2), false),
            (Op::Cast(Cast { to: DType::F32 }), vec![Result(3)], false),
            binary(Binary::Mul, Result(4), Input(2), true),
        ];
        let layout = |shape: &[usize]| TensorLayout { dtype: DType::F32, shape: shape.to_vec() };
        let shapes: [(&[usize], [&[usize]; 3]); 8] = [
            (&[7], [&[7], &[1], &[]]),
            (&[5000], [&[5000], &[1], &[]]),
            (&[3, 4100], [&[4100], &[3, 1], &[]]),
            (&[40, 256], [&[256], &[40, 1], &[1, 1]]),
            (&[2, 3, 5, 7], [&[3, 1, 1], &[2, 1, 5, 1], &[7]]),
            (&[2, 3, 70, 70], [&[70, 70], &[2, 1, 1, 1], &[1]]),
            (&[4, 6, 33, 40], [&[6, 1, 1], &[33, 40], &[4, 6, 33, 40]]),
            (&[2, 1, 3000, 2], [&[1, 2], &[2, 1, 3000, 1], &[3000, 1]]),
        ];
        for (shape, operand_shapes) in shapes {
            let layouts =
                [layout(shape), layout(operand_shapes[0]), layout(operand_shapes[1]), layout(operand_shapes[2])];
            assert_like_separate_ops(&ops, &layouts, shape);
            assert_like_separate_ops(&narrow_ops, &[layout(shape), layout(shape), layouts[2].clone()], shape);
            assert_like_separate_ops(&dropout_ops, &[layout(shape), layout(operand_shapes[0]), counter.clone()], shape);
        }
    }
}
