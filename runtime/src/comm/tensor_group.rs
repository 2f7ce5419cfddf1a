//! The rank of a worker in its tensor-parallel group, whose workers run the same program on different shards.
//!
//! All devices of a group run the same kernels, so their collectives come in the same order and a counter identifies
//! them. A worker contributes its tensor, waits for the others, and computes its own result. Sums are added in device
//! order, so all devices get bitwise equal results. A wait ends when all have contributed or one has failed. Devices of
//! other processes contribute over connections.

use crate::comm::communicator::{Communicator, Tensors};
use crate::device::api::Rows;
use crate::device::buffer::Buffer;
use crate::device::context::DeviceContext;
use crate::device::error::DeviceError;
use crate::device::layout::{TensorLayout, accumulation_bytes, accumulation_type};
use crate::device::region::{Region, RegionMut};
use compiler::op::collective::run_together;
use compiler::op::sharding::{runs, whole_of};
use compiler::op::{Op, ReduceKind, Sharding, SplitDim};
use compiler::tensor::{DType, Tensor};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Communicator of the same worker on every device. A contribution is a list of one tensor: the operand of that device,
/// in its memory, the host's, or received from another process.
pub type TensorComm = Communicator<Tensors>;

/// One rank of all tensor-parallel groups of a run, which have equal degrees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRank {
    pub degree: usize,
    pub rank: usize,
}

impl GroupRank {
    /// The number of this rank of a worker among the ranks of all workers. Those of a group are consecutive.
    pub fn global(self, worker: usize) -> usize {
        worker * self.degree + self.rank
    }
}

/// The shape of a device's shard of an operand, and how the operand is cut.
type Shard<'a> = Option<(&'a [usize], SplitDim)>;

/// Sharding of each parameter, by name.
pub type Layouts = BTreeMap<String, Sharding>;

pub struct TensorRank {
    communicator: Arc<TensorComm>,
    device: usize,
    devices: usize,
    layouts: Arc<Layouts>,
    collectives: AtomicU64,
}

impl TensorRank {
    /// `layouts` gives the sharding of the parameters.
    pub fn new(communicator: Arc<TensorComm>, device: usize, devices: usize, layouts: Arc<Layouts>) -> TensorRank {
        TensorRank { communicator, device, devices, layouts, collectives: AtomicU64::new(0) }
    }

    fn gather(&self, operand: Arc<Buffer>) -> Result<Vec<Arc<Buffer>>, DeviceError> {
        let (number, bytes) = (self.collectives.fetch_add(1, Ordering::Relaxed), operand.len());
        self.communicator.contribute(number, self.device, vec![(0, operand)]);
        let operands = self.communicator.wait(number)?;
        let operand = |(rank, operand): (usize, &Tensors)| {
            let operand = operand.first().map_or_else(|| Arc::new(Buffer::empty()), |(_, operand)| operand.clone());
            check_size(rank, operand.len(), bytes).map(|()| operand)
        };
        operands.iter().enumerate().map(operand).collect()
    }

    /// This rank's place in the group.
    pub fn rank(&self) -> usize {
        self.device
    }

    fn gather_host(&self, operand: Tensor) -> Result<Vec<Tensor>, DeviceError> {
        let (dtype, shape) = (operand.dtype(), operand.shape().to_vec());
        let host = |part: &Arc<Buffer>| {
            let bytes = part.download()?.to_vec();
            Ok(Tensor::new(dtype, shape.clone(), bytes.into()).expect("operands have equal sizes"))
        };
        self.gather(Arc::new(Buffer::host_copy(operand.bytes())))?.iter().map(host).collect()
    }

    /// True if [`TensorRank::gather_shards`] needs this rank's tensor of that name.
    pub fn is_gathered(&self, name: &str) -> bool {
        self.device == 0 || matches!(self.layouts.get(name), Some(Sharding::Split(_)))
    }

    /// Gathers the shards of named parameters on rank 0; the others return `None`. All ranks must call it with the same
    /// names of split parameters. Blocks until all have contributed.
    pub fn gather_shards(
        &self,
        shards: BTreeMap<String, Tensor>,
    ) -> Result<Option<BTreeMap<String, Tensor>>, DeviceError> {
        let mut gathered = BTreeMap::new();
        for (name, shard) in shards {
            match self.layouts.get(&name) {
                Some(Sharding::Split(cut)) if self.device == 0 => {
                    gathered.insert(name, whole_of(&self.gather_host(shard)?, *cut));
                }
                Some(Sharding::Split(_)) => _ = self.gather(Arc::new(Buffer::host_copy(shard.bytes())))?,
                _ => _ = gathered.insert(name, shard),
            }
        }
        Ok(Some(gathered).filter(|_| self.device == 0))
    }

    /// All-reduces the sums of squares of these parameters' gradients. Unsharded parameters are equal on all devices
    /// and count once.
    pub fn whole_squares(&self, names: &[&str], squares: &[f64]) -> Result<Vec<f64>, DeviceError> {
        let gathered = self.gather_host(Tensor::from_f64(&[squares.len()], squares))?;
        let rank_squares: Vec<Vec<f64>> = gathered.iter().map(Tensor::to_f64).collect();
        let is_split = |name: &&str| matches!(self.layouts.get(*name), Some(Sharding::Split(_)));
        let split_flags = names.iter().map(is_split).enumerate();
        Ok(split_flags
            .map(|(index, is_split)| {
                rank_squares
                    .iter()
                    .take(if is_split { rank_squares.len() } else { 1 })
                    .map(|squares| squares[index])
                    .sum()
            })
            .collect())
    }

    /// Runs a collective op on this rank's tensor and writes its result. Only maxima, minima and products, and sums of
    /// integers, pass through the host.
    pub fn run_collective(
        &self,
        op: &Op,
        (layout, operand): (&TensorLayout, Region<'_>),
        output: RegionMut<'_>,
        device: &DeviceContext,
    ) -> Result<(), DeviceError> {
        let shard_shape = |cut: SplitDim| {
            let mut part = layout.shape.clone();
            part[cut.axis] /= self.devices;
            part
        };
        match op {
            Op::Shard(o) => self.copy_shard(&shard_shape(o.cut), o.cut, (layout.dtype, operand), output, device),
            Op::AllReduce(o) if o.kind == ReduceKind::Sum && layout.dtype.is_float() => {
                self.sum(layout.dtype, operand, None, output, device)
            }
            Op::ReduceScatter(o) if layout.dtype.is_float() => {
                self.sum(layout.dtype, operand, Some((&shard_shape(o.cut), o.cut)), output, device)
            }
            Op::AllGather(o) => self.concatenate(o.cut, (layout.dtype, operand), (&layout.shape, None), output, device),
            Op::AllToAll(o) => {
                let shape = shard_shape(o.to);
                self.concatenate(o.from, (layout.dtype, operand), (&shape, Some((&shape, o.to))), output, device)
            }
            _ => self.run_on_host(op, (layout, operand), output, device),
        }
    }

    fn run_on_host(
        &self,
        op: &Op,
        (layout, operand): (&TensorLayout, Region<'_>),
        output: RegionMut<'_>,
        device: &DeviceContext,
    ) -> Result<(), DeviceError> {
        let operand =
            Tensor::new(layout.dtype, layout.shape.clone(), device.stream.begin_download(operand)?.bytes()?.into());
        let operand = operand.expect("a region has the size of its layout");
        let parts = self.gather_host(operand)?;
        let got = run_together(op, &parts, self.device).expect("only tensor-parallel collectives reach this");
        device.stream.upload(got.bytes(), output)
    }

    /// Copies this device's shard, of this shape, of a whole tensor.
    fn copy_shard(
        &self,
        shape: &[usize],
        cut: SplitDim,
        (dtype, whole): (DType, Region<'_>),
        to: RegionMut<'_>,
        device: &DeviceContext,
    ) -> Result<(), DeviceError> {
        let (count, width) = runs(shape, cut, dtype);
        let rows = Rows { count, width, from_pitch: width * self.devices, to_pitch: width };
        device.stream.copy_rows(rows, whole.slice(self.device * width..whole.len()), to)
    }

    /// Calls `use_part` for the operand of each device in order, or for this device's shard of it.
    fn for_each_part(
        &self,
        (dtype, operand): (DType, Region<'_>),
        shard: Shard<'_>,
        device: &DeviceContext,
        mut use_part: impl FnMut(usize, Region<'_>) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let mut cut_out = shard.map(|_| device.take_staging(operand.len() / self.devices)).transpose()?;
        let mut copy = device.take_staging(operand.len())?;
        device.stream.copy(operand, Buffer::exclusive(&mut copy))?;
        device.release(&copy)?;
        let parts = self.gather(copy.clone())?;
        device.give(copy);
        for (rank, part) in parts.into_iter().enumerate() {
            let part = device.receive(part)?;
            match (&mut cut_out, shard) {
                (Some(to), Some((shape, cut))) => {
                    self.copy_shard(shape, cut, (dtype, part.region()), Buffer::exclusive(to), device)?;
                    use_part(rank, to.region())?;
                }
                _ => use_part(rank, part.region())?,
            }
            device.give_foreign(part)?;
        }
        cut_out.into_iter().for_each(|buffer| device.give(buffer));
        Ok(())
    }

    /// Concatenates the operands of all devices, or this device's shards of them; each has this shape.
    fn concatenate(
        &self,
        cut: SplitDim,
        operand: (DType, Region<'_>),
        (shape, shard): (&[usize], Shard<'_>),
        mut output: RegionMut<'_>,
        device: &DeviceContext,
    ) -> Result<(), DeviceError> {
        let (count, width) = runs(shape, cut, operand.0);
        let (rows, end) = (Rows { count, width, from_pitch: width, to_pitch: width * self.devices }, output.len());
        self.for_each_part(operand, shard, device, |rank, part| {
            device.stream.copy_rows(rows, part, output.reborrow().slice((rank * width).min(end)..end))
        })
    }

    /// Adds the operands of all devices in device order, or this device's shards of them. Sums of 16-bit numbers are
    /// rounded once.
    fn sum(
        &self,
        dtype: DType,
        operand: Region<'_>,
        shard: Shard<'_>,
        mut output: RegionMut<'_>,
        device: &DeviceContext,
    ) -> Result<(), DeviceError> {
        let (stream, sum_type) = (&device.stream, accumulation_type(dtype));
        let is_wide = sum_type != dtype;
        let mut wide_sum = is_wide.then(|| device.take_staging(accumulation_bytes(dtype, output.len()))).transpose()?;
        self.for_each_part((dtype, operand), shard, device, |rank, part| match (rank, &mut wide_sum) {
            (0, None) => stream.copy(part, output.reborrow()),
            (_, None) => stream.accumulate(dtype, part, output.reborrow()),
            (0, Some(sum)) => stream.begin_sum(dtype, part, Buffer::exclusive(sum)),
            (_, Some(sum)) => stream.accumulate(dtype, part, Buffer::exclusive(sum)),
        })?;
        if let Some(sum) = wide_sum {
            stream.cast((sum_type, sum.region()), (dtype, output))?;
            device.give(sum);
        }
        Ok(())
    }

    /// Fails all current and future waits, after this worker failed.
    pub fn abandon(&self) {
        self.communicator.abandon();
    }
}

/// An operand from another process has one of the sizes that the stage has, which may be that of another collective.
fn check_size(rank: usize, found: usize, expected: usize) -> Result<(), DeviceError> {
    match found == expected {
        true => Ok(()),
        false => Err(DeviceError::Failed {
            device: format!("of tensor-parallel rank {rank}"),
            what: format!("its operand has {found} bytes, expected {expected}"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::device::cpu;
    use compiler::op::{AllGather, AllReduce, AllToAll, ReduceScatter, Shard};

    #[test]
    fn devices_in_threads_get_what_the_reference_gives() {
        let devices = 4;
        let cut = |axis, blocks| SplitDim { axis, blocks };
        let ops = [
            Op::AllReduce(AllReduce { kind: ReduceKind::Sum, devices }),
            Op::AllReduce(AllReduce { kind: ReduceKind::Max, devices }),
            Op::ReduceScatter(ReduceScatter { cut: cut(1, 2), devices }),
            Op::AllGather(AllGather { cut: cut(0, 1), devices }),
            Op::AllToAll(AllToAll { from: cut(0, 1), to: cut(1, 1), devices }),
            Op::Shard(Shard { cut: cut(1, 2), devices }),
        ];
        for dtype in [DType::F32, DType::F64, DType::Bf16, DType::I64] {
            let operand = |device: usize| {
                let values: Vec<f64> = (0..64).map(|i| ((i * 37 + device * 11) % 41) as f64 - 20.0).collect();
                Tensor::from_f64(&[4, 16], &values).cast(dtype)
            };
            let operands: Vec<Tensor> = (0..devices).map(operand).collect();
            let communicator = Arc::new(TensorComm::new(devices));
            std::thread::scope(|scope| {
                for device in 0..devices {
                    let tensor_rank = TensorRank::new(communicator.clone(), device, devices, Arc::default());
                    let (ops, operands) = (&ops, &operands);
                    scope.spawn(move || {
                        let context = DeviceContext::new(cpu(), Arc::default()).unwrap();
                        for op in ops {
                            let (want, operand) = (run_together(op, operands, device).unwrap(), &operands[device]);
                            let layout = TensorLayout { dtype, shape: operand.shape().to_vec() };
                            let operand = Buffer::host_copy(operand.bytes());
                            let mut got = Buffer::host_copy(&vec![0xff; want.bytes().len()]);
                            tensor_rank
                                .run_collective(op, (&layout, operand.region()), got.region_mut(), &context)
                                .unwrap();
                            assert_eq!(got.download().unwrap(), &want.bytes()[..], "{op:?} of {dtype}");
                        }
                    });
                }
            });
        }
    }

    /// Another process may send an operand of another collective of the stage.
    #[test]
    fn operands_of_other_sizes_are_refused() {
        let context = DeviceContext::new(cpu(), Arc::default()).unwrap();
        let layout = TensorLayout { dtype: DType::F32, shape: vec![2] };
        for kind in [ReduceKind::Sum, ReduceKind::Max] {
            for bytes in [0, 4, 16] {
                let communicator = Arc::new(TensorComm::among(2, 1, None));
                let tensor_rank = TensorRank::new(communicator.clone(), 0, 2, Arc::default());
                assert!(communicator.arrive(0, 1, vec![(0, Arc::new(Buffer::host(bytes)))]));
                let (operand, mut result) = (Buffer::host(8), Buffer::host(8));
                let op = Op::AllReduce(AllReduce { kind, devices: 2 });
                let refused = tensor_rank
                    .run_collective(&op, (&layout, operand.region()), result.region_mut(), &context)
                    .unwrap_err();
                let message = refused.to_string();
                let expected = format!("its operand has {bytes} bytes, expected 8");
                assert!(message.contains("of tensor-parallel rank 1") && message.contains(&expected), "{message}");
            }
        }
    }

    #[test]
    fn the_first_rank_gathers_shards() {
        let layouts = Arc::new(Layouts::from([("split".to_string(), Sharding::split(0))]));
        let communicator = Arc::new(TensorComm::new(2));
        let gathered = std::thread::scope(|scope| {
            let ranks = [0, 1].map(|device| {
                let tensor_rank = TensorRank::new(communicator.clone(), device, 2, layouts.clone());
                assert_eq!([tensor_rank.is_gathered("split"), tensor_rank.is_gathered("both")], [true, device == 0]);
                scope.spawn(move || {
                    let tensor = |values: &[f64]| Tensor::from_f64(&[1], values);
                    let split = ("split".to_string(), tensor(&[device as f64]));
                    tensor_rank.gather_shards(BTreeMap::from([split, ("both".to_string(), tensor(&[7.0]))])).unwrap()
                })
            });
            ranks.map(|rank| rank.join().unwrap())
        });
        let gathered_tensors = gathered[0].as_ref().unwrap();
        assert_eq!(
            (gathered_tensors["split"].to_f64(), gathered_tensors["both"].to_f64()),
            (vec![0.0, 1.0], vec![7.0])
        );
        assert!(gathered[1].is_none() && communicator.unfinished() == 0);
    }
}
