//! Convolutions and poolings.

use super::argument::Number;
use super::{Known, NodeOutputs, Outputs, Scope, one, resize};
use crate::import::build::Build;
use crate::import::lower_error::{LowerReason, groups};
use crate::import::onnx::lower::reduce::global_pool;
use crate::import::onnx::lower::window::with_bias;
use crate::op::{AvgPool, Binary, Conv, ConvInputGrad, MaxPool, Op, Value, Window};
use crate::tensor::dim::Dim;

/// One number per axis, each at least `minimum`; a single number applies to all `axes`.
pub fn each(
    scope: &Scope<'_>,
    name: &'static str,
    axes: usize,
    default: usize,
    minimum: i64,
) -> Result<Vec<usize>, LowerReason> {
    let list = scope.ints(name)?.filter(|l| !l.is_empty());
    let list = list.unwrap_or_else(|| vec![default as i64]);
    let fits = |v: &i64| u32::try_from(*v).ok().filter(|_| *v >= minimum).map(|v| v as usize);
    let sizes: Option<Vec<usize>> = list.iter().map(fits).collect();
    match sizes {
        Some(sizes) if sizes.len() == axes => Ok(sizes),
        Some(sizes) if sizes.len() == 1 => Ok(vec![sizes[0]; axes]),
        _ => {
            let expected = "one number in range for each spatial axis";
            Err(LowerReason::Attribute { name, found: format!("{list:?}"), expected })
        }
    }
}

fn symmetric(strides: Vec<usize>, pads: Vec<usize>, dilations: Vec<usize>) -> Window {
    Window { strides, pads_begin: pads.clone(), pads_end: pads, dilations }
}

fn kernel_of(scope: &Scope<'_>, weight: Value) -> Result<Vec<usize>, LowerReason> {
    let fact = scope.fact(weight);
    let sizes = fact.concrete().filter(|s| s.len() > 2 && s[2..].iter().all(|k| *k > 0));
    sizes.map(|s| s[2..].to_vec()).ok_or_else(|| LowerReason::Inputs(format!("its weight is {fact}")))
}

/// The input with a batch axis, the weight, the kernel, and whether the batch axis was added.
fn operands(scope: &mut Scope<'_>) -> Result<(Value, Value, Vec<usize>, bool), LowerReason> {
    let (x, weight) = (scope.value("input")?, scope.value("weight")?);
    let kernel = kernel_of(scope, weight)?;
    let single = scope.fact(x).rank() == kernel.len() + 1;
    let x = with_batch(scope, x, kernel.len() + 2)?;
    Ok((x, weight, kernel, single))
}

fn finished(scope: &mut Scope<'_>, mut y: Value, single: bool) -> Outputs {
    if let Some(bias) = scope.optional("bias")? {
        y = with_bias(scope, Binary::Add, y, bias)?;
    }
    one(without_batch(scope, y, single)?)
}

pub fn conv(scope: &mut Scope<'_>) -> Outputs {
    if scope.flag("transposed", false)? {
        return conv_transpose(scope);
    }
    let (x, weight, kernel, single) = operands(scope)?;
    let axes = kernel.len();
    let (strides, dilations) = (each(scope, "stride", axes, 1, 1)?, each(scope, "dilation", axes, 1, 1)?);
    let mut window = symmetric(strides, vec![0; axes], dilations);
    match scope.argument("padding") {
        Some(crate::import::fx::schema::Argument::AsString(mode)) => match mode.as_str() {
            "valid" => {}
            "same" if window.strides.iter().all(|s| *s == 1) => {
                for (axis, size) in kernel.iter().enumerate() {
                    // An odd element of padding goes to the end.
                    let total = window.dilations[axis].saturating_mul(size - 1);
                    (window.pads_begin[axis], window.pads_end[axis]) = (total / 2, total - total / 2);
                }
            }
            other => return Err(LowerReason::Unsupported(format!("the padding mode `{other}`"))),
        },
        _ => {
            window.pads_begin = each(scope, "padding", axes, 0, 0)?;
            window.pads_end.clone_from(&window.pads_begin);
        }
    }
    let groups = groups("groups", scope.int("groups", 1)?)?;
    let y = scope.add(Op::Conv(Conv { window, groups }), &[x, weight])?;
    finished(scope, y, single)
}

pub fn convolution_window(scope: &Scope<'_>, axes: usize) -> Result<(Window, usize), LowerReason> {
    let (strides, dilations) = (each(scope, "stride", axes, 1, 1)?, each(scope, "dilation", axes, 1, 1)?);
    Ok((symmetric(strides, each(scope, "padding", axes, 0, 0)?, dilations), groups("groups", scope.int("groups", 1)?)?))
}

/// Transposed convolution: the input gradient of a convolution with weight `[C, O/groups, K…]`.
pub fn conv_transpose(scope: &mut Scope<'_>) -> Outputs {
    let (x, weight, kernel, single) = operands(scope)?;
    let axes = kernel.len();
    let (strides, dilations) = (each(scope, "stride", axes, 1, 1)?, each(scope, "dilation", axes, 1, 1)?);
    let window = symmetric(strides, each(scope, "padding", axes, 0, 0)?, dilations);
    let extra = each(scope, "output_padding", axes, 0, 0)?;
    let sizes = scope.fact(x).shape;
    let mut spatial = Vec::with_capacity(axes);
    for i in 0..axes {
        let extent = Dim::from(window.dilations[i]).mul(&Dim::from(kernel[i] - 1))?.add(&Dim::from(extra[i] + 1))?;
        let last_start = sizes[2 + i].sub(&Dim::Known(1))?.mul(&Dim::from(window.strides[i]))?;
        let pads = Dim::from(window.pads_begin[i]).add(&Dim::from(window.pads_end[i]))?;
        spatial.push(last_start.add(&extent)?.sub(&pads)?);
    }
    let groups = groups("groups", scope.int("groups", 1)?)?;
    let y = scope.add(Op::ConvInputGrad(ConvInputGrad { window, groups, spatial }), &[x, weight])?;
    finished(scope, y, single)
}

/// `x` of rank `rank`: a missing batch axis is added.
pub fn with_batch(scope: &mut Scope<'_>, x: Value, rank: usize) -> Result<Value, LowerReason> {
    let mut shape = scope.fact(x).shape;
    if shape.len() + 1 == rank {
        shape.insert(0, Dim::Known(1));
    }
    if shape.len() != rank {
        return Err(LowerReason::Inputs(format!("its input is {}", scope.fact(x))));
    }
    scope.reshape(x, shape)
}

/// `x` without the batch axis, if it was `added`.
pub fn without_batch(scope: &mut Scope<'_>, x: Value, added: bool) -> Result<Value, LowerReason> {
    let shape = scope.fact(x).shape[usize::from(added)..].to_vec();
    scope.reshape(x, shape)
}

/// The operand as `[N, C, D…]` with `axes` spatial axes, and whether the batch axis was added.
fn spatial(scope: &mut Scope<'_>, axes: usize) -> Result<(Value, bool), LowerReason> {
    let x = scope.value("self")?;
    let single = scope.fact(x).rank() == axes + 1;
    Ok((with_batch(scope, x, axes + 2)?, single))
}

/// The values of a pooling, and no indices.
fn pooled(scope: &mut Scope<'_>, y: Value, single: bool) -> Outputs {
    let y = without_batch(scope, y, single)?;
    Ok(NodeOutputs::Tensors(vec![Known::Value(y), Known::Absent("the indices of a max pooling")]))
}

/// Kernel, window and `ceil_mode` of a pooling over `axes` spatial axes.
pub fn pool_window(scope: &Scope<'_>, axes: usize, dilated: bool) -> Result<(Vec<usize>, Window, bool), LowerReason> {
    let kernel = each(scope, "kernel_size", axes, 1, 1)?;
    let strides = match scope.ints("stride")? {
        Some(list) if !list.is_empty() => each(scope, "stride", axes, 1, 1)?,
        _ => kernel.clone(),
    };
    let dilations = if dilated { each(scope, "dilation", axes, 1, 1)? } else { vec![1; axes] };
    let window = symmetric(strides, each(scope, "padding", axes, 0, 0)?, dilations);
    Ok((kernel, window, scope.flag("ceil_mode", false)?))
}

pub fn max_pool(scope: &mut Scope<'_>, axes: usize) -> Outputs {
    let (x, single) = spatial(scope, axes)?;
    let (kernel, window, ceil) = pool_window(scope, axes, true)?;
    let y = scope.add(Op::MaxPool(MaxPool { kernel, window, ceil }), &[x])?;
    pooled(scope, y, single)
}

pub fn avg_pool(scope: &mut Scope<'_>, axes: usize) -> Outputs {
    let (x, single) = spatial(scope, axes)?;
    let (mut kernel, window, ceil) = pool_window(scope, axes, false)?;
    if ceil {
        // A window that exceeds the padded image is clipped.
        let sizes = scope.fact(x).shape[2..].to_vec();
        for (axis, size) in sizes.iter().enumerate() {
            let padded = size.known().and_then(|size| usize::try_from(size).ok());
            let padded = padded.map(|size| size + window.pads_begin[axis] + window.pads_end[axis]);
            kernel[axis] = padded.map_or(kernel[axis], |padded| kernel[axis].min(padded));
        }
    }
    let count_padding = scope.flag("count_include_pad", true)?;
    let divisor = scope.number("divisor_override")?.map(Number::float);
    let elements: usize = kernel.iter().product();
    let count_padding = match divisor {
        Some(_) if ceil => return Err(LowerReason::Unsupported("a pooling with a custom divisor".to_string())),
        Some(_) => true,
        None => count_padding,
    };
    let mut y = scope.add(Op::AvgPool(AvgPool { kernel, window, ceil, count_padding }), &[x])?;
    if let Some(divisor) = divisor {
        y = scope.with_number(Binary::Mul, y, elements as f64 / divisor)?;
    }
    one(without_batch(scope, y, single)?)
}

/// Adaptive pooling to the given output sizes.
pub fn adaptive_pool(scope: &mut Scope<'_>, axes: usize, largest: bool) -> Outputs {
    let (x, single) = spatial(scope, axes)?;
    let sizes = scope.fact(x).shape[2..].to_vec();
    let mut output_size = scope.shape("output_size")?;
    if output_size.len() == 1 {
        output_size = vec![output_size[0].clone(); axes];
    }
    if output_size.len() != axes {
        return Err(LowerReason::Inputs(format!("{} output sizes for {axes} spatial axes", output_size.len())));
    }
    if output_size.iter().all(|d| d.is(1)) && (!largest || sizes.iter().any(|size| size.known().is_none())) {
        let y = global_pool(scope, x, largest)?;
        return pooled(scope, y, single);
    }
    let mut kernel = Vec::with_capacity(axes);
    for (size, output_size) in sizes.iter().zip(&output_size) {
        let each = if output_size == size { Ok(Dim::Known(1)) } else { size.div_exact(output_size) };
        let each = each.ok().and_then(|d| d.known()).and_then(|v| u32::try_from(v).ok()).filter(|v| *v > 0);
        kernel.extend(each.map(|v| v as usize));
    }
    if kernel.len() < axes {
        let y = resize::adaptive(scope, x, &output_size, largest)?;
        return pooled(scope, y, single);
    }
    let window = symmetric(kernel.clone(), vec![0; axes], vec![1; axes]);
    let y = match largest {
        true => scope.add(Op::MaxPool(MaxPool { kernel, window, ceil: false }), &[x])?,
        false => scope.add(Op::AvgPool(AvgPool { kernel, window, ceil: false, count_padding: true }), &[x])?,
    };
    pooled(scope, y, single)
}
