//! Pools against PyTorch, padding rules, and invalid attributes.

use super::*;
use crate::op::conv::even;
use crate::op::sample::assert_close;

/// `[1, 1, 4, 5]`: `(7 i) mod 20`.
fn scattered() -> Tensor {
    Tensor::from_f64(&[1, 1, 4, 5], &(0..20).map(|i| (i * 7 % 20) as f64).collect::<Vec<_>>())
}

/// `[1, 1, 3, 3]`: 1 to 9.
fn ramp() -> Tensor {
    Tensor::from_f64(&[1, 1, 3, 3], &(1..10).map(f64::from).collect::<Vec<_>>())
}

// torch.nn.functional.max_pool2d(x, 3, 2, 1, 1, ceil_mode=True) and its backward
#[test]
fn max_pool_agrees_with_pytorch() {
    let forward = MaxPool { kernel: vec![3, 3], window: even(2, 2, 1, 1), ceil: true };
    let y = run(&forward, &[scattered()]);
    assert_eq!(y[0].shape(), [1, 1, 3, 3]);
    assert_close(&y[0], &[15., 16., 16., 17., 19., 18., 12., 19., 13.]);
    let dx = run(&MaxPoolGrad { forward }, &[scattered(), ramp()]);
    let expected = [0., 0., 0., 0., 0., 1., 0., 0., 5., 0., 0., 4., 0., 0., 6., 0., 7., 13., 0., 9.];
    assert_close(&dx[0], &expected);
}

// torch.nn.functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=…) and its backward
#[test]
fn avg_pool_agrees_with_pytorch() {
    let sixth = 1.0 / 6.0;
    let excluding = [6., 8. + sixth, 7., 10. + sixth, 10. + 4. * sixth, 11. + sixth, 8.5, 12. + 2. * sixth, 9.5];
    let including = [24. / 9., 49. / 9., 28. / 9., 61. / 9., 96. / 9., 67. / 9., 17. / 6., 37. / 6., 19. / 6.];
    for (count_padding, expected) in [(false, excluding), (true, including)] {
        let forward = AvgPool { kernel: vec![3, 3], window: even(2, 2, 1, 1), ceil: true, count_padding };
        assert_close(&run(&forward, &[scattered()])[0], &expected);
        let spatial = vec![Dim::from(4i64), Dim::from(5i64)];
        let dx = run(&AvgPoolGrad { forward, spatial }, &[ramp()])[0].to_f64();
        let corner = if count_padding { 1.0 / 9.0 } else { 0.25 };
        assert!((dx[0] - corner).abs() < 1e-12 && (dx[19] - if count_padding { 39. / 18. } else { 5.5 }).abs() < 1e-12);
    }
}

#[test]
fn what_rounding_up_adds_beyond_the_padding_never_counts() {
    // torch.nn.functional.avg_pool1d(arange(6), 3, 2, 1, ceil_mode=True, count_include_pad=…)
    let x = Tensor::from_f64(&[1, 1, 6], &[0., 1., 2., 3., 4., 5.]);
    for (count_padding, expected) in [(false, [0.5, 2., 4., 5.]), (true, [1. / 3., 2., 4., 2.5])] {
        let op = AvgPool { kernel: vec![3], window: even(1, 2, 1, 1), ceil: true, count_padding };
        assert_close(&run(&op, std::slice::from_ref(&x))[0], &expected);
    }
    // torch.nn.functional.max_pool1d(x, 2, 3, 1, ceil_mode=True) and max_pool1d(x, 2, 1, 1, 3)
    let op = MaxPool { kernel: vec![2], window: even(1, 3, 1, 1), ceil: true };
    assert_close(&run(&op, std::slice::from_ref(&x))[0], &[0., 3., 5.]);
    let op = MaxPool { kernel: vec![2], window: even(1, 1, 1, 3), ceil: false };
    assert_close(&run(&op, &[x])[0], &[2., 3., 4., 5., 3.]);
}

#[test]
fn padding_never_wins_and_the_first_of_equals_does() {
    let x = Tensor::from_f64(&[1, 1, 4], &[-3., -1., -1., -2.]);
    let forward = MaxPool { kernel: vec![4], window: even(1, 2, 1, 1), ceil: false };
    assert_close(&run(&forward, std::slice::from_ref(&x))[0], &[-1., -1.]);
    let dy = Tensor::from_f64(&[1, 1, 2], &[5., 7.]);
    assert_close(&run(&MaxPoolGrad { forward }, &[x, dy])[0], &[0., 12., 0., 0.]);
}

#[test]
fn nan_and_minus_infinity_win_where_they_must() {
    let x = Tensor::from_f64(&[1, 1, 4], &[1., f64::NAN, f64::NEG_INFINITY, f64::NEG_INFINITY]);
    let forward = MaxPool { kernel: vec![2], window: even(1, 2, 0, 1), ceil: false };
    let y = run(&forward, std::slice::from_ref(&x))[0].to_f64();
    assert!(y[0].is_nan() && y[1] == f64::NEG_INFINITY);
    let dy = Tensor::from_f64(&[1, 1, 2], &[5., 7.]);
    assert_close(&run(&MaxPoolGrad { forward }, &[x, dy])[0], &[0., 5., 7., 0.]);
}

#[test]
fn a_window_of_padding_alone_passes_nothing_on() {
    let x = Tensor::from_f64(&[1, 1, 1], &[3.]);
    let max = MaxPool { kernel: vec![1], window: even(1, 1, 1, 1), ceil: false };
    assert_eq!(run(&max, std::slice::from_ref(&x))[0].to_f64(), [f64::NEG_INFINITY, 3., f64::NEG_INFINITY]);
    let dy = Tensor::from_f64(&[1, 1, 3], &[5., 7., 9.]);
    assert_close(&run(&MaxPoolGrad { forward: max }, &[x.clone(), dy.clone()])[0], &[7.]);
    let avg = AvgPool { kernel: vec![1], window: even(1, 1, 1, 1), ceil: false, count_padding: false };
    assert_close(&run(&avg, &[x])[0], &[0., 3., 0.]);
    assert_close(&run(&AvgPoolGrad { forward: avg, spatial: vec![Dim::from(1i64)] }, &[dy])[0], &[7.]);
}
