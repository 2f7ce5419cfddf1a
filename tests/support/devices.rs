//! Training on every kind of device, with results that must be bitwise equal.

use compiler::tensor::Tensor;
use runtime::device::api::Device;
use runtime::device::open;
use runtime::device::sanitizer::device::sanitizer;
use runtime::train::error::TrainError;
use runtime::train::job::{RunOptions, TrainJob, Trained};
use runtime::train::run::{run, train};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Trains on the CPU and on the device that checks the order of streams. Returns the CPU's result.
pub fn train_everywhere(training: &TrainJob<'_>) -> Result<Trained, TrainError> {
    let expected = train(training, &mut |_| {});
    let options = RunOptions { devices: vec![sanitizer()], ..RunOptions::default() };
    let got = run(training, options, &mut |_| {});
    match (&expected, &got) {
        (Ok(expected), Ok(got)) => assert_equal(expected, got),
        (Err(expected), Err(got)) => assert_eq!(expected.to_string(), got.to_string()),
        (Ok(_), Err(fault)) => panic!("only on {}: {fault}", sanitizer().info().name),
        (Err(fault), Ok(_)) => panic!("not on {}: {fault}", sanitizer().info().name),
    }
    expected
}

pub fn assert_equal(expected: &Trained, got: &Trained) {
    let bits = |losses: &[f64]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&expected.losses), bits(&got.losses));
    let differing = |expected: &BTreeMap<String, Tensor>, got: &BTreeMap<String, Tensor>| {
        assert_eq!(expected.keys().collect::<Vec<_>>(), got.keys().collect::<Vec<_>>());
        expected.iter().find(|(name, tensor)| tensor.bytes() != got[*name].bytes()).map(|(name, _)| name.clone())
    };
    assert_eq!(differing(&expected.weights, &got.weights), None, "weights");
    assert_eq!(differing(&expected.gradients, &got.gradients), None, "gradients");
}

/// The devices of tests that run on any kind: those of `$PIPEC_TEST_DEVICES`, such as `cuda:0,cuda:1`, else the CPU.
pub fn under_test() -> Vec<Arc<dyn Device>> {
    let names = std::env::var("PIPEC_TEST_DEVICES").unwrap_or_else(|_| "cpu".to_string());
    names.split(',').map(|name| open(name).unwrap_or_else(|error| panic!("{name}: {error}"))).collect()
}
