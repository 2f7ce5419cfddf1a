//! A worker's seat among the devices that share its stages: where it meets the workers that run the same program on the others' parts.
//!
//! All devices of a group run one program with the same kernels, so that each comes to its meetings in the same order: counting them is
//! enough to tell them apart. A worker brings its tensor, waits for those of the others, and makes what it gets by itself. Sums are added in
//! the order of the devices, hence all have the same bits. It waits until all have come, or until one is gone.

use crate::link::rendezvous::{Abandoned, Rendezvous};
use compiler::op::collective::met;
use compiler::op::layout::part_of;
use compiler::op::{KernelError, Layout, Op, ReduceKind};
use compiler::tensor::{DType, Tensor};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where the same worker of every device meets.
pub type Table = Rendezvous<Tensor>;

/// How parameters lie, by name.
pub type Layouts = BTreeMap<String, Layout>;

/// A worker's place at its table.
pub struct Seat {
    table: Arc<Table>,
    device: usize,
    devices: usize,
    layouts: Arc<Layouts>,
    met: AtomicU64,
}

impl Seat {
    /// The seat of a device at a table of so many, which have parameters in these layouts.
    pub fn new(table: Arc<Table>, device: usize, devices: usize, layouts: Arc<Layouts>) -> Seat {
        Seat { table, device, devices, layouts, met: AtomicU64::new(0) }
    }

    fn gather(&self, own: Tensor) -> Result<Arc<Vec<Tensor>>, Abandoned> {
        let number = self.met.fetch_add(1, Ordering::Relaxed);
        self.table.bring(number, self.device, own);
        self.table.meet(number)
    }

    /// Sums of squares of gradients of these parameters, of each device's parts, as those of the whole: what is not split all devices have
    /// alike, and counts once.
    pub fn whole_squares(&self, names: &[&str], own: &[f64]) -> Result<Vec<f64>, Abandoned> {
        let all = self.gather(Tensor::from_f64(&[own.len()], own))?;
        let of: Vec<Vec<f64>> = all.iter().map(Tensor::to_f64).collect();
        let is_split = |name: &&str| matches!(self.layouts.get(*name), Some(Layout::Split(_)));
        let each = names.iter().map(is_split).enumerate();
        Ok(each.map(|(at, split)| of.iter().take(if split { of.len() } else { 1 }).map(|of| of[at]).sum()).collect())
    }

    /// Does an op of the group: brings this device's tensor, and writes what it gets.
    pub fn meet(&self, op: &Op, own: Tensor, output: &mut [u8]) -> Result<(), KernelError> {
        if let Op::Shard(shard) = op {
            output.copy_from_slice(part_of(&own, shard.cut, self.devices, self.device).bytes());
            return Ok(());
        }
        let parts = self.gather(own).map_err(|_| KernelError::Gone)?;
        match op {
            Op::AllReduce(o) if o.kind == ReduceKind::Sum => add_up(parts.iter().cloned(), output),
            Op::ReduceScatter(o) => {
                let own = parts.iter().map(|term| part_of(term, o.cut, self.devices, self.device));
                add_up(own, output);
            }
            _ => {
                let got = met(op, &parts, self.device).expect("only what devices do together comes here");
                output.copy_from_slice(got.bytes());
            }
        }
        Ok(())
    }

    /// This worker will not come any more; everyone who waits for it is told.
    pub fn abandon(&self) {
        self.table.abandon();
    }
}

/// Terms one after the other, rounded after each as a device rounds that adds two tensors.
fn add_up(terms: impl Iterator<Item = Tensor>, sum: &mut [u8]) {
    let terms: Vec<Tensor> = terms.collect();
    match terms[0].dtype() {
        DType::F32 => each::<4>(&terms, sum, |a, b| (f32::from_le_bytes(a) + f32::from_le_bytes(b)).to_le_bytes()),
        DType::F64 => each::<8>(&terms, sum, |a, b| (f64::from_le_bytes(a) + f64::from_le_bytes(b)).to_le_bytes()),
        _ => {
            let op = Op::AllReduce(compiler::op::AllReduce { kind: ReduceKind::Sum, devices: terms.len() });
            let total = met(&op, &terms, 0).expect("a sum of terms is one of the ops of a group");
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
    use compiler::op::{AllGather, AllReduce, AllToAll, Cut, ReduceScatter, Shard};

    #[test]
    fn devices_in_threads_get_what_the_reference_gives() {
        let devices = 4;
        let cut = |axis, blocks| Cut { axis, blocks };
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
            let table = Arc::new(Table::new(devices));
            std::thread::scope(|scope| {
                for device in 0..devices {
                    let seat = Seat::new(table.clone(), device, devices, Arc::default());
                    let (ops, all) = (&ops, &all);
                    scope.spawn(move || {
                        for op in ops {
                            let want = met(op, all, device).unwrap();
                            let mut got = vec![0xff; want.bytes().len()];
                            seat.meet(op, all[device].clone(), &mut got).unwrap();
                            assert_eq!(got, want.bytes().to_vec(), "{op:?} of {dtype}");
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn nobody_waits_for_a_device_that_is_gone() {
        let table = Arc::new(Table::new(2));
        let seats = [0, 1].map(|device| Seat::new(table.clone(), device, 2, Arc::default()));
        let op = Op::AllReduce(AllReduce { kind: ReduceKind::Sum, devices: 2 });
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| seats[0].meet(&op, Tensor::from_f32(&[1], &[1.0]), &mut [0; 4]));
            seats[1].abandon();
            assert_eq!(waiter.join().unwrap(), Err(KernelError::Gone));
        });
    }
}
