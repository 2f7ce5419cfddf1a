//! The rank of a worker in its tensor-parallel group, whose workers run the same program on different shards.
//!
//! All devices of a group run the same kernels, so their collectives come in the same order and a counter identifies
//! them. A worker contributes its tensor, waits for the others, and computes its own result. Sums are added in device
//! order, so all devices get bitwise equal results. A wait ends when all have contributed or one has failed.

use crate::comm::communicator::{Communicator, PeerLost};
use crate::device::buffer::Buffer;
use crate::device::context::DeviceContext;
use crate::device::error::DeviceError;
use crate::device::layout::TensorLayout;
use crate::device::region::{Region, RegionMut};
use compiler::op::collective::met;
use compiler::op::sharding::part_of;
use compiler::op::{KernelError, Op, ReduceKind, Sharding};
use compiler::tensor::{DType, Tensor};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Communicator of the same worker on every device.
pub type TensorComm = Communicator<TensorPart>;

/// The operand of one device.
#[derive(Clone)]
pub enum TensorPart {
    Host(Tensor),
    /// In device memory, for sums.
    Device(Arc<Buffer>),
}

/// Sharding of each parameter, by name.
pub type Layouts = BTreeMap<String, Sharding>;

pub struct TensorRank {
    table: Arc<TensorComm>,
    device: usize,
    devices: usize,
    layouts: Arc<Layouts>,
    met: AtomicU64,
}

impl TensorRank {
    /// `layouts` gives the sharding of the parameters.
    pub fn new(table: Arc<TensorComm>, device: usize, devices: usize, layouts: Arc<Layouts>) -> TensorRank {
        TensorRank { table, device, devices, layouts, met: AtomicU64::new(0) }
    }

    fn gather(&self, own: TensorPart) -> Result<Arc<Vec<TensorPart>>, PeerLost> {
        let number = self.met.fetch_add(1, Ordering::Relaxed);
        self.table.bring(number, self.device, own);
        self.table.meet(number)
    }

    fn gather_host(&self, own: Tensor) -> Result<Vec<Tensor>, PeerLost> {
        let parts = self.gather(TensorPart::Host(own))?;
        let host = |part: &TensorPart| match part {
            TensorPart::Host(tensor) => tensor.clone(),
            TensorPart::Device(_) => unreachable!("all devices run the same op"),
        };
        Ok(parts.iter().map(host).collect())
    }

    /// All-reduces the sums of squares of these parameters' gradients. Unsharded parameters are equal on all devices
    /// and count once.
    pub fn whole_squares(&self, names: &[&str], own: &[f64]) -> Result<Vec<f64>, PeerLost> {
        let all = self.gather_host(Tensor::from_f64(&[own.len()], own))?;
        let of: Vec<Vec<f64>> = all.iter().map(Tensor::to_f64).collect();
        let is_split = |name: &&str| matches!(self.layouts.get(*name), Some(Sharding::Split(_)));
        let each = names.iter().map(is_split).enumerate();
        Ok(each.map(|(at, split)| of.iter().take(if split { of.len() } else { 1 }).map(|of| of[at]).sum()).collect())
    }

    /// Runs a collective op on this rank's tensor and writes its result. Sums stay in device memory; other ops pass
    /// through the host.
    pub fn meet(
        &self,
        op: &Op,
        (layout, own): (&TensorLayout, Region<'_>),
        output: RegionMut<'_>,
        device: &DeviceContext,
    ) -> Result<(), DeviceError> {
        match op {
            Op::AllReduce(o) if o.kind == ReduceKind::Sum && matches!(layout.dtype, DType::F32 | DType::F64) => {
                return self.sum(layout.dtype, own, output, device);
            }
            _ => {}
        }
        let mut bytes = Vec::new();
        device.stream.download_with(own, &mut |from| bytes = from.to_vec())?;
        let own = Tensor::new(layout.dtype, layout.shape.clone(), bytes.into());
        let own = own.expect("a region has the size of its layout");
        if let Op::Shard(shard) = op {
            return device.stream.upload(part_of(&own, shard.cut, self.devices, self.device).bytes(), output);
        }
        let parts = self.gather_host(own).map_err(|_| KernelError::Disconnected)?;
        device.stream.upload_with(output, &mut |output| match op {
            Op::AllReduce(o) if o.kind == ReduceKind::Sum => sum_in_order(&parts, output),
            Op::ReduceScatter(o) => {
                let own = parts.iter().map(|term| part_of(term, o.cut, self.devices, self.device));
                sum_in_order(&own.collect::<Vec<_>>(), output);
            }
            _ => {
                let got = met(op, &parts, self.device).expect("only tensor-parallel collectives reach this");
                output.copy_from_slice(got.bytes());
            }
        })
    }

    /// Adds the terms of all devices in device order.
    fn sum(
        &self,
        dtype: DType,
        own: Region<'_>,
        mut output: RegionMut<'_>,
        device: &DeviceContext,
    ) -> Result<(), DeviceError> {
        let mut term = device.take_staging(own.len())?;
        device.stream.copy(own, Buffer::exclusive(&mut term))?;
        device.release(&term)?;
        let parts = self.gather(TensorPart::Device(term.clone())).map_err(|_| KernelError::Disconnected)?;
        for (at, part) in parts.iter().enumerate() {
            let TensorPart::Device(part) = part else { unreachable!("all devices run the same op") };
            let part = device.receive(part.clone())?;
            match at {
                0 => device.stream.copy(part.region(), output.reborrow())?,
                _ => device.stream.accumulate(dtype, part.region(), output.reborrow())?,
            }
            device.give_foreign(part)?;
        }
        device.give(term);
        Ok(())
    }

    /// Fails all current and future waits, after this worker failed.
    pub fn abandon(&self) {
        self.table.abandon();
    }
}

/// Adds terms in order with rounding after each addition, as a device that adds two tensors at a time would.
fn sum_in_order(terms: &[Tensor], sum: &mut [u8]) {
    match terms[0].dtype() {
        DType::F32 => each::<4>(terms, sum, |a, b| (f32::from_le_bytes(a) + f32::from_le_bytes(b)).to_le_bytes()),
        DType::F64 => each::<8>(terms, sum, |a, b| (f64::from_le_bytes(a) + f64::from_le_bytes(b)).to_le_bytes()),
        _ => {
            let op = Op::AllReduce(compiler::op::AllReduce { kind: ReduceKind::Sum, devices: terms.len() });
            let total = met(&op, terms, 0).expect("an all-reduce is one of the group's ops");
            sum.copy_from_slice(total.bytes());
        }
    }
}

fn each<const N: usize>(terms: &[Tensor], sum: &mut [u8], add: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    sum.copy_from_slice(terms[0].bytes());
    for term in &terms[1..] {
        for (sum, term) in sum.as_chunks_mut::<N>().0.iter_mut().zip(term.bytes().as_chunks::<N>().0) {
            *sum = add(*sum, *term);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::device::cpu;
    use compiler::op::{AllGather, AllReduce, AllToAll, ReduceScatter, Shard, SplitDim};

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
            let own = |device: usize| {
                let values: Vec<f64> = (0..64).map(|i| ((i * 37 + device * 11) % 41) as f64 - 20.0).collect();
                Tensor::from_f64(&[4, 16], &values).cast(dtype)
            };
            let all: Vec<Tensor> = (0..devices).map(own).collect();
            let table = Arc::new(TensorComm::new(devices));
            std::thread::scope(|scope| {
                for device in 0..devices {
                    let tensor_rank = TensorRank::new(table.clone(), device, devices, Arc::default());
                    let (ops, all) = (&ops, &all);
                    scope.spawn(move || {
                        let context = DeviceContext::new(cpu(), Arc::default()).unwrap();
                        for op in ops {
                            let (want, own) = (met(op, all, device).unwrap(), &all[device]);
                            let layout = TensorLayout { dtype, shape: own.shape().to_vec() };
                            let own = Buffer::host_copy(own.bytes());
                            let mut got = Buffer::host_copy(&vec![0xff; want.bytes().len()]);
                            tensor_rank.meet(op, (&layout, own.region()), got.region_mut(), &context).unwrap();
                            assert_eq!(got.download().unwrap(), &want.bytes()[..], "{op:?} of {dtype}");
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn nobody_waits_for_a_device_that_is_gone() {
        let table = Arc::new(TensorComm::new(2));
        let tensor_ranks = [0, 1].map(|device| TensorRank::new(table.clone(), device, 2, Arc::default()));
        let op = Op::AllReduce(AllReduce { kind: ReduceKind::Sum, devices: 2 });
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let context = DeviceContext::new(cpu(), Arc::default()).unwrap();
                let layout = TensorLayout { dtype: DType::F32, shape: vec![1] };
                let (own, mut sum) = (Buffer::host(4), Buffer::host(4));
                tensor_ranks[0].meet(&op, (&layout, own.region()), sum.region_mut(), &context)
            });
            tensor_ranks[1].abandon();
            assert_eq!(waiter.join().unwrap(), Err(DeviceError::Kernel(KernelError::Disconnected)));
        });
    }
}
