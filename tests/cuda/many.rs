//! Kernels over many small tensors in one launch.

use super::on_simulated_gpu;
use compiler::tensor::{DType, Tensor};
use runtime::device::api::{AverageStep, Device};
use runtime::device::buffer::Buffer;
use runtime::device::cuda::gpu;
use runtime::device::open;
use std::sync::Arc;

/// More tensors than one launch takes, some of them empty or in other element types.
fn tensors() -> Vec<Tensor> {
    let tensor = |at: usize| {
        let values: Vec<f32> = (0..at * 37 % 50).map(|i| (i * 7 % 23) as f32 - at as f32 / 3.0).collect();
        Tensor::from_f32(&[values.len()], &values).cast(if at % 40 < 35 { DType::F32 } else { DType::F64 })
    };
    (0..90).map(tensor).collect()
}

/// The tensors after two moving averages, all together.
fn average_twice(device: &dyn Device) -> Vec<u8> {
    let (stream, tensors) = (device.stream().unwrap(), tensors());
    let mut states: Vec<Buffer> = tensors.iter().map(|tensor| device.upload(tensor.bytes()).unwrap()).collect();
    for round in 1..3 {
        let sample = |tensor: &Tensor| (0..tensor.len()).map(|i| (i * round) as f64 / 7.0).collect();
        let samples: Vec<Vec<f64>> = tensors.iter().map(sample).collect();
        let triples = tensors.iter().zip(&samples).zip(&mut states).enumerate();
        let mut steps = Vec::new();
        for (at, ((tensor, sample), state)) in triples {
            let keep = 0.9 - at as f64 / 1000.0;
            steps.push(AverageStep { dtype: tensor.dtype(), sample, keep, state: state.region_mut() });
        }
        stream.moving_averages(steps).unwrap();
    }
    let regions: Vec<_> = states.iter().map(Buffer::region).collect();
    let download = stream.begin_download_all(&regions).unwrap();
    download.bytes().unwrap()
}

#[test]
fn a_gpu_averages_many_states_like_the_cpu() {
    if gpu::count() == 0 {
        println!("skipped: no GPU");
        return;
    }
    let devices: [Arc<dyn Device>; 2] = ["cpu", "cuda:0"].map(|name| open(name).unwrap());
    let [cpu, gpu] = devices.map(|device| average_twice(&*device));
    assert!(cpu == gpu && !cpu.is_empty());
}

#[test]
fn many_tensors_take_few_launches() {
    if let Some((_, launches)) = on_simulated_gpu("many::a_gpu_averages_many_states_like_the_cpu", &[]) {
        assert!(launches < 20, "{launches} launches");
    }
}
