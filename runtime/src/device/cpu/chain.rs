//! Fused elementwise ops, run tile by tile so that intermediates stay in the first-level cache.
//!
//! A tile is a range of outermost rows with about `PIECE` elements. Every op has its own kernel for the tile shape, so
//! it rounds as when run alone. Broadcast operands are broadcast within the tile.

use super::dropout;
use super::table;
use super::walk::stretched;
use super::{ALIGNMENT, FastKernel, TensorLayout};
use crate::device::chain::{Link, Operand};
use bytemuck::cast_slice;
use compiler::op::{KernelError, Op};
use compiler::pass::fuse::{MOST_READ, MOST_WRITTEN};

/// Elements per tile: a few tensors of it fit into the first-level cache.
const PIECE: usize = 2048;
/// Maximum dimensions outside a tile, after merging.
const MOST_OUTER: usize = 8;
/// Maximum live intermediates of a tile.
const MOST_SLOTS: usize = 8;
/// Maximum operands of an op.
const MOST_OPERANDS: usize = 3;

/// A chain at concrete shapes.
pub struct Chain {
    given: Vec<Given>,
    written: Vec<TensorLayout>,
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
struct Given {
    layout: TensorLayout,
    outer: Vec<usize>,
    row: usize,
    /// Bytes of one row, or of the whole tile if rows are broadcast.
    bytes: usize,
}

#[derive(Clone, Copy)]
enum At {
    Given(usize),
    /// An intermediate: slot and bytes per element.
    Slot(usize, usize),
    Written(usize),
}

/// Position of a tile: start byte in each input, first output element, number of rows.
struct Piece {
    starts: [usize; MOST_READ],
    first: usize,
    rows: usize,
}

struct Step {
    /// For a full tile and for the last, smaller one.
    kernels: [Option<FastKernel>; 2],
    operands: Vec<At>,
    /// Whether the kernel also reads the number of the first element.
    reads_place: bool,
    result: At,
}

impl Chain {
    /// `None` if an op has no fast kernel or the shapes are unsuitable.
    pub fn new(links: &[Link], given: &[TensorLayout]) -> Option<Chain> {
        let shape = &links.first()?.result.shape;
        let written: Vec<TensorLayout> = links.iter().filter(|l| l.is_written).map(|l| l.result.clone()).collect();
        let is_small = given.len() <= MOST_READ && written.len() <= MOST_WRITTEN && !shape.contains(&0);
        if !is_small || links.iter().any(|l| l.result.shape != *shape || l.operands.len() > MOST_OPERANDS) {
            return None;
        }
        let strides: Vec<Vec<isize>> = given.iter().map(|layout| stretched(&layout.shape, shape)).collect();
        let (dims, strides) = joined(shape, &strides);
        let cut = (0..dims.len()).find(|&axis| dims[axis + 1..].iter().product::<usize>() <= PIECE)?;
        if cut > MOST_OUTER {
            return None;
        }
        let width: usize = dims[cut + 1..].iter().product();
        let height = (PIECE / width).clamp(1, dims[cut]);
        // Shape of an input within a tile of `rows` rows.
        let part = |of: usize, rows: usize| -> Vec<usize> {
            let size = |axis: usize| if axis == cut { rows } else { dims[axis] };
            (cut..dims.len()).map(|axis| if strides[of][axis] == 0 { 1 } else { size(axis) }).collect()
        };
        let piece = |rows: usize| [&[rows][..], &dims[cut + 1..]].concat();
        let given_parts = given.iter().zip(&strides).enumerate().map(|(of, (layout, strides))| {
            let far = |axis: usize| strides[axis] as usize * layout.dtype.size();
            let bytes = part(of, 1).iter().product::<usize>() * layout.dtype.size();
            Given { layout: layout.clone(), outer: (0..cut).map(far).collect(), row: far(cut), bytes }
        });
        let given_parts: Vec<Given> = given_parts.collect();
        let (places, slots) = places(links)?;
        let mut steps = Vec::new();
        for (link, result) in links.iter().zip(&places) {
            let kernel = |rows: usize| {
                let layout = |operand: &Operand| match *operand {
                    Operand::Input(i) => TensorLayout { dtype: given[i].dtype, shape: part(i, rows) },
                    Operand::Result(i) => TensorLayout { dtype: links[i].result.dtype, shape: piece(rows) },
                };
                let operands: Vec<TensorLayout> = link.operands.iter().map(layout).collect();
                let result = TensorLayout { dtype: link.result.dtype, shape: piece(rows) };
                match &link.op {
                    Op::Dropout(op) => dropout::piece(op, &result),
                    op => table::fast_or_half(op, &operands, &[result]),
                }
            };
            let rest = dims[cut] % height;
            let kernels = [Some(kernel(height)?), if rest > 0 { Some(kernel(rest)?) } else { None }];
            let at = |operand: &Operand| match *operand {
                Operand::Input(i) => At::Given(i),
                Operand::Result(i) => places[i],
            };
            let operands = link.operands.iter().map(at).collect();
            let reads_place = matches!(link.op, Op::Dropout(_));
            steps.push(Step { kernels, operands, reads_place, result: *result });
        }
        let largest = links.iter().map(|l| l.result.dtype.size()).max()?;
        let slot_bytes = (height * width * largest).next_multiple_of(ALIGNMENT);
        let kernel_bytes =
            steps.iter().flat_map(|step| step.kernels.iter().flatten()).map(|fast| fast.workspace).max()?;
        let (outer, rows) = (dims[..cut].to_vec(), dims[cut]);
        Some(Chain { given: given_parts, written, steps, outer, rows, height, width, slots, slot_bytes, kernel_bytes })
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
        let expected = self.given.iter().map(|g| g.layout.bytes()).chain(self.written.iter().map(TensorLayout::bytes));
        assert!(lengths.eq(expected), "buffer sizes of a chain do not match their layouts");
        let mut slots: [&mut [u8]; MOST_SLOTS] = Default::default();
        let (slot_memory, kernel_memory) = workspace.split_at_mut(self.slots * self.slot_bytes);
        for (slot, bytes) in slots.iter_mut().zip(slot_memory.chunks_exact_mut(self.slot_bytes)) {
            *slot = bytes;
        }
        let mut at = [0; MOST_READ];
        let mut counters = [0; MOST_OUTER];
        let mut done = 0;
        for _ in 0..self.outer.iter().product::<usize>() {
            for row in (0..self.rows).step_by(self.height) {
                let rows = self.height.min(self.rows - row);
                let mut piece = Piece { starts: at, first: done, rows };
                for (start, given) in piece.starts.iter_mut().zip(&self.given) {
                    *start += row * given.row;
                }
                self.piece(inputs, outputs, &mut slots, kernel_memory, &piece)?;
                done += rows * self.width;
            }
            for axis in (0..self.outer.len()).rev() {
                counters[axis] += 1;
                let back = counters[axis] == self.outer[axis];
                for (at, given) in at.iter_mut().zip(&self.given) {
                    match back {
                        true => *at -= given.outer[axis] * (self.outer[axis] - 1),
                        false => *at += given.outer[axis],
                    }
                }
                if !back {
                    break;
                }
                counters[axis] = 0;
            }
        }
        Ok(())
    }

    /// Runs one tile.
    fn piece(
        &self,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        slots: &mut [&mut [u8]; MOST_SLOTS],
        kernel_memory: &mut [u8],
        piece: &Piece,
    ) -> Result<(), KernelError> {
        let (first, count) = (piece.first, piece.rows * self.width);
        for step in &self.steps {
            // Move the output out so that the other buffers can be borrowed.
            match step.result {
                At::Slot(slot, size) => {
                    let whole = std::mem::take(&mut slots[slot]);
                    let done =
                        self.step(step, inputs, outputs, slots, piece, (&mut whole[..count * size], kernel_memory));
                    slots[slot] = whole;
                    done?;
                }
                At::Written(i) => {
                    let (whole, size) = (std::mem::take(&mut outputs[i]), self.written[i].dtype.size());
                    let range = first * size..(first + count) * size;
                    let done = self.step(step, inputs, outputs, slots, piece, (&mut whole[range], kernel_memory));
                    outputs[i] = whole;
                    done?;
                }
                At::Given(_) => unreachable!("a result is not an operand"),
            }
        }
        Ok(())
    }

    fn step(
        &self,
        step: &Step,
        inputs: &[&[u8]],
        outputs: &[&mut [u8]],
        slots: &[&mut [u8]; MOST_SLOTS],
        piece: &Piece,
        (result, kernel_memory): (&mut [u8], &mut [u8]),
    ) -> Result<(), KernelError> {
        let (first, rows, count) = (piece.first, piece.rows, piece.rows * self.width);
        let kernel = &step.kernels[usize::from(rows < self.height)];
        let Some(FastKernel { body, workspace, .. }) = kernel else {
            unreachable!("there is a kernel for the remaining rows")
        };
        let mut operands: [&[u8]; MOST_OPERANDS] = Default::default();
        for (bytes, operand) in operands.iter_mut().zip(&step.operands) {
            *bytes = match *operand {
                At::Given(i) => {
                    let (given, start) = (&self.given[i], piece.starts[i]);
                    &inputs[i][start..start + if given.row == 0 { given.bytes } else { rows * given.bytes }]
                }
                At::Slot(slot, size) => &slots[slot][..count * size],
                At::Written(i) => {
                    let size = self.written[i].dtype.size();
                    &outputs[i][first * size..(first + count) * size]
                }
            };
        }
        let (place, mut count) = ([first as i64], step.operands.len());
        if step.reads_place {
            operands[count] = cast_slice(&place);
            count += 1;
        }
        body(&operands[..count], &mut [result], &mut kernel_memory[..*workspace])
    }
}

/// Result locations and the number of slots. A slot is free after the last op that reads it.
fn places(links: &[Link]) -> Option<(Vec<At>, usize)> {
    let mut last: Vec<usize> = (0..links.len()).collect();
    for (at, link) in links.iter().enumerate() {
        for operand in &link.operands {
            if let Operand::Result(made) = *operand {
                last[made] = at;
            }
        }
    }
    let mut busy_until: Vec<Option<usize>> = Vec::new();
    let (mut places, mut written) = (Vec::new(), 0);
    for (at, link) in links.iter().enumerate() {
        if link.is_written {
            places.push(At::Written(written));
            written += 1;
            continue;
        }
        // Operands of this op are still in use.
        let slot = busy_until.iter().position(|until| until.is_none_or(|until| until < at)).unwrap_or(busy_until.len());
        if slot == busy_until.len() {
            busy_until.push(None);
        }
        busy_until[slot] = Some(last[at]);
        places.push(At::Slot(slot, link.result.dtype.size()));
    }
    (busy_until.len() <= MOST_SLOTS).then_some((places, busy_until.len()))
}

/// Drops dimensions of size 1 and merges adjacent dimensions that are contiguous for every operand.
fn joined(shape: &[usize], strides: &[Vec<isize>]) -> (Vec<usize>, Vec<Vec<isize>>) {
    let mut dims: Vec<usize> = Vec::new();
    let mut joined: Vec<Vec<isize>> = vec![Vec::new(); strides.len()];
    for (axis, &dim) in shape.iter().enumerate().filter(|&(_, &dim)| dim != 1) {
        let crosses = |(above, own): (&Vec<isize>, &Vec<isize>)| above.last() == Some(&(own[axis] * dim as isize));
        if !dims.is_empty() && joined.iter().zip(strides).all(crosses) {
            *dims.last_mut().expect("there is a dim above") *= dim;
            for (above, own) in joined.iter_mut().zip(strides) {
                *above.last_mut().expect("there is a dim above") = own[axis];
            }
        } else {
            dims.push(dim);
            joined.iter_mut().zip(strides).for_each(|(above, own)| above.push(own[axis]));
        }
    }
    (dims, joined)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::buffer::Buffer;
    use crate::device::cpu::Kernel;
    use compiler::op::table::rule;
    use compiler::op::{Binary, Cast, Compare, Dropout, Select, Unary};
    use compiler::tensor::DType;
    use compiler::tensor::fact::Fact;

    fn aligned(bytes: usize) -> Vec<u64> {
        vec![0; bytes.div_ceil(8)]
    }

    fn slice(buffer: &mut [u64], bytes: usize) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(buffer)[..bytes]
    }

    type Ops = Vec<(Op, Vec<Operand>, bool)>;

    /// Requires equal bytes from the separate ops and the chain.
    fn same_as_apart(ops: &Ops, given: &[TensorLayout], shape: &[usize]) {
        let fact = |layout: &TensorLayout| Fact::of(layout.dtype, &layout.shape);
        let inputs: Vec<Vec<u64>> = given
            .iter()
            .enumerate()
            .map(|(i, layout)| {
                let mut buffer = aligned(layout.bytes());
                let values: &mut [f32] = bytemuck::cast_slice_mut(slice(&mut buffer, layout.bytes()));
                values.iter_mut().enumerate().for_each(|(j, v)| *v = ((j * 37 + i * 11) % 101) as f32 / 17.0 - 2.9);
                buffer
            })
            .collect();
        let inputs: Vec<&[u8]> =
            inputs.iter().zip(given).map(|(b, l)| &bytemuck::cast_slice::<u64, u8>(b)[..l.bytes()]).collect();
        let mut made: Vec<(TensorLayout, Vec<u64>)> = Vec::new();
        for (op, operands, _) in ops {
            let layout = |operand: &Operand| match *operand {
                Operand::Input(i) => given[i].clone(),
                Operand::Result(i) => made[i].0.clone(),
            };
            let facts: Vec<Fact> = operands.iter().map(|o| fact(&layout(o))).collect();
            let results = rule(op).infer(&facts.iter().collect::<Vec<_>>()).unwrap();
            let result = TensorLayout::of(&results[0]);
            assert_eq!(result.shape, shape);
            let mut buffer = aligned(result.bytes());
            let read: Vec<&[u8]> = operands
                .iter()
                .map(|operand| match *operand {
                    Operand::Input(i) => inputs[i],
                    Operand::Result(i) => &bytemuck::cast_slice::<u64, u8>(&made[i].1)[..made[i].0.bytes()],
                })
                .collect();
            let kernel = Kernel::new(op, &facts, &results);
            let mut workspace = Buffer::host(kernel.workspace());
            kernel.run(&read, &mut [slice(&mut buffer, result.bytes())], workspace.bytes_mut()).unwrap();
            made.push((result, buffer));
        }
        let link = |(at, (op, operands, is_written)): (usize, &(Op, Vec<Operand>, bool))| {
            let (op, operands, result) = (op.clone(), operands.clone(), made[at].0.clone());
            Link { op, operands, result, is_written: *is_written, others: Vec::new() }
        };
        let links: Vec<Link> = ops.iter().enumerate().map(link).collect();
        let chain = Chain::new(&links, given).expect("these shapes suit");
        let wanted: Vec<&(TensorLayout, Vec<u64>)> =
            made.iter().zip(ops).filter(|(_, op)| op.2).map(|(made, _)| made).collect();
        let mut outputs: Vec<Vec<u64>> = wanted.iter().map(|(layout, _)| aligned(layout.bytes())).collect();
        let mut written: Vec<&mut [u8]> =
            outputs.iter_mut().zip(&wanted).map(|(buffer, (layout, _))| slice(buffer, layout.bytes())).collect();
        let mut workspace = Buffer::host(chain.workspace());
        chain.run(&inputs, &mut written, workspace.bytes_mut()).unwrap();
        for (got, (_, want)) in outputs.iter().zip(&wanted) {
            assert!(got == want, "{shape:?}");
        }
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
        let dropped: Ops = vec![
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
        let of = |shape: &[usize]| TensorLayout { dtype: DType::F32, shape: shape.to_vec() };
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
        for (shape, others) in shapes {
            let given = [of(shape), of(others[0]), of(others[1]), of(others[2])];
            same_as_apart(&ops, &given, shape);
            same_as_apart(&narrow_ops, &[of(shape), of(shape), given[2].clone()], shape);
            same_as_apart(&dropped, &[of(shape), of(others[0]), counter.clone()], shape);
        }
    }
}
