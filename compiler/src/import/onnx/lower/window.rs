//! Convolutions and pooling.

use super::{Known, LowerReason, Outputs, Scope, pool};
use crate::import::build::Build;
use crate::import::lower_error::groups;
use crate::op::{AvgPool, Binary, Conv, ConvInputGrad, MaxPool, Op, Value, Window};
use crate::tensor::DType;
use crate::tensor::dim::Dim;

/// Reads strides, dilations and padding for a kernel over `spatial` dims, including `auto_pad`.
fn window(scope: &Scope<'_>, spatial: &[Dim], kernel: &[usize]) -> Result<Window, LowerReason> {
    let axes = kernel.len();
    let strides = scope.sizes_of("strides", axes, 1, 1)?;
    let dilations = scope.sizes_of("dilations", axes, 1, 1)?;
    let (pads_begin, pads_end) = match scope.text("auto_pad", "NOTSET")?.as_str() {
        "NOTSET" | "" => {
            let pads = scope.sizes_of("pads", 2 * axes, 0, 0)?;
            (pads[..axes].to_vec(), pads[axes..].to_vec())
        }
        "VALID" => (vec![0; axes], vec![0; axes]),
        mode @ ("SAME_UPPER" | "SAME_LOWER") => {
            let (mut begin, mut end) = (Vec::new(), Vec::new());
            for i in 0..axes {
                let total = same_padding(&spatial[i], kernel[i], strides[i], dilations[i])?;
                let small = total / 2;
                let (before, after) =
                    if mode == "SAME_UPPER" { (small, total - small) } else { (total - small, small) };
                begin.push(before);
                end.push(after);
            }
            (begin, end)
        }
        other => return Err(LowerReason::Unsupported(format!("the padding `{other}`"))),
    };
    Ok(Window { strides, pads_begin, pads_end, dilations })
}

/// The total padding that gives `⌈size / stride⌉` windows.
fn same_padding(size: &Dim, kernel: usize, stride: usize, dilation: usize) -> Result<usize, LowerReason> {
    let unknown_size = || LowerReason::Inputs(format!("the padding that keeps an axis of size {size} is unknown"));
    if stride == 1 {
        return Ok(dilation.saturating_mul(kernel - 1));
    }
    let size = size.known().and_then(|v| usize::try_from(v).ok()).ok_or_else(unknown_size)?;
    let windows = size.div_ceil(stride);
    let extent = windows.saturating_sub(1).saturating_mul(stride).saturating_add(dilation.saturating_mul(kernel - 1));
    Ok((extent + 1).saturating_sub(size))
}

pub fn spatial_of(scope: &Scope<'_>, x: Value) -> Result<Vec<Dim>, LowerReason> {
    let fact = scope.fact(x);
    match fact.shape.get(2..) {
        Some(dims) if !dims.is_empty() => Ok(dims.to_vec()),
        _ => Err(LowerReason::Inputs(format!("its input {fact} has no spatial dims"))),
    }
}

/// The kernel size of a weight `[O, C, K…]`. An attribute `kernel_shape` must agree.
fn kernel_of(scope: &Scope<'_>, weight: Value, axes: usize) -> Result<Vec<usize>, LowerReason> {
    let fact = scope.fact(weight);
    let sizes = fact.shape.get(2..).unwrap_or_default().iter();
    let kernel: Option<Vec<usize>> =
        sizes.map(|d| d.known().and_then(|v| usize::try_from(v).ok()).filter(|v| *v > 0)).collect();
    let kernel = kernel
        .filter(|k| k.len() == axes)
        .ok_or_else(|| LowerReason::Inputs(format!("its weight {fact} does not fit {axes} spatial dims")))?;
    if let Some(declared) = scope.ints("kernel_shape")?
        && !declared.iter().copied().eq(kernel.iter().map(|&k| k as i64))
    {
        let found = format!("{declared:?}");
        return Err(LowerReason::Attribute { name: "kernel_shape", found, expected: "the last dims of the weight" });
    }
    Ok(kernel)
}

/// Applies `op` to `y` and one value per channel.
pub fn with_bias(scope: &mut impl Build, op: Binary, y: Value, bias: Value) -> Result<Value, LowerReason> {
    let dims = scope.fact(bias).shape;
    let [channels] = dims.as_slice() else {
        return Err(LowerReason::Inputs(format!("{} does not have one number per channel", scope.fact(bias))));
    };
    let mut shape = vec![channels.clone()];
    shape.extend(vec![Dim::Known(1); scope.fact(y).rank().saturating_sub(2)]);
    let bias = scope.reshape(bias, shape)?;
    scope.binary(op, y, bias)
}

fn add_bias(scope: &mut Scope<'_>, y: Value) -> Outputs {
    let y = match scope.optional(2)? {
        Some(bias) => with_bias(scope, Binary::Add, y, bias)?,
        None => y,
    };
    Ok(vec![Known::Value(y)])
}

pub fn conv(scope: &mut Scope<'_>) -> Outputs {
    let (x, w) = (scope.value(0)?, scope.value(1)?);
    let y = convolve(scope, x, w)?;
    add_bias(scope, y)
}

/// Convolution with the attributes of the node, without bias.
pub fn convolve(scope: &mut Scope<'_>, x: Value, w: Value) -> Result<Value, LowerReason> {
    let spatial = spatial_of(scope, x)?;
    let kernel = kernel_of(scope, w, spatial.len())?;
    let (window, groups) = (window(scope, &spatial, &kernel)?, groups("group", scope.int("group", 1)?)?);
    scope.add(Op::Conv(Conv { window, groups }), &[x, w])
}

/// Transposed convolution: the input gradient of a convolution. The weight `[C, O/groups, K…]` is that of the forward
/// convolution.
pub fn conv_transpose(scope: &mut Scope<'_>) -> Outputs {
    let (x, w) = (scope.value(0)?, scope.value(1)?);
    let sizes = spatial_of(scope, x)?;
    let axes = sizes.len();
    let kernel = kernel_of(scope, w, axes)?;
    let groups = groups("group", scope.int("group", 1)?)?;
    let extra = scope.sizes_of("output_padding", axes, 0, 0)?;
    let mode = scope.text("auto_pad", "NOTSET")?;
    let is_same = mode.starts_with("SAME");
    let output_shape = scope.ints("output_shape")?;
    // With a given output shape, the padding is inferred.
    let mut window = if is_same || output_shape.is_some() {
        let (strides, dilations) = (scope.sizes_of("strides", axes, 1, 1)?, scope.sizes_of("dilations", axes, 1, 1)?);
        Window { strides, dilations, pads_begin: vec![0; axes], pads_end: vec![0; axes] }
    } else {
        window(scope, &sizes, &kernel)?
    };
    let mut spatial = Vec::with_capacity(axes);
    for i in 0..axes {
        let extent = Dim::from(window.dilations[i]).mul(&Dim::from(kernel[i] - 1))?.add(&Dim::from(extra[i] + 1))?;
        let last_start = sizes[i].sub(&Dim::Known(1))?.mul(&Dim::from(window.strides[i]))?;
        let pads = Dim::from(window.pads_begin[i]).add(&Dim::from(window.pads_end[i]))?;
        let full_size = last_start.add(&extent)?.sub(&pads)?;
        let wanted_size = match &output_shape {
            // Some files include batch and channels.
            Some(list) => list.len().checked_sub(axes).and_then(|from| list.get(from + i)).map(|v| Dim::Known(*v)),
            None if is_same => Some(sizes[i].mul(&Dim::from(window.strides[i]))?),
            None => Some(full_size.clone()),
        };
        let wanted_size = wanted_size.ok_or_else(|| {
            LowerReason::attribute("output_shape", format!("{output_shape:?}"), "one number for each spatial axis")
        })?;
        // Excess size is removed by padding; a lack is filled with zeros at the end.
        let total = full_size.sub(&wanted_size)?.known().and_then(|v| usize::try_from(v).ok()).unwrap_or(0);
        let (small, large) = (total / 2, total - total / 2);
        let (before, after) = if mode == "SAME_UPPER" { (small, large) } else { (large, small) };
        window.pads_begin[i] += before;
        window.pads_end[i] += after;
        spatial.push(wanted_size);
    }
    let y = scope.add(Op::ConvInputGrad(ConvInputGrad { window, groups, spatial }), &[x, w])?;
    add_bias(scope, y)
}

/// Kernel size, window and `ceil_mode` of a pooling operator.
pub fn pool_window(scope: &Scope<'_>, x: Value) -> Result<(Vec<usize>, Window, bool), LowerReason> {
    let spatial = spatial_of(scope, x)?;
    if !scope.is_set("kernel_shape") {
        return Err(LowerReason::attribute("kernel_shape", "missing", "one number for each spatial axis"));
    }
    let kernel = scope.sizes_of("kernel_shape", spatial.len(), 1, 1)?;
    let window = window(scope, &spatial, &kernel)?;
    Ok((kernel, window, scope.flag("ceil_mode", false)?))
}

/// Max pooling, with the indices if they are read.
pub fn max_pool(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let (kernel, window, ceil) = pool_window(scope, x)?;
    let dtype = scope.fact(x).dtype;
    // 8-bit integers are exact in F32.
    let x = if matches!(dtype, DType::I8 | DType::U8) { scope.cast(x, DType::F32)? } else { x };
    let mut outputs = vec![Known::Absent("the output `Indices` of MaxPool"); 2];
    if scope.node.outputs.get(1).is_some_and(|name| !name.is_empty()) {
        let by_columns = scope.flag("storage_order", false)?;
        outputs[1] = Known::Value(pool::places(scope, x, &kernel, &window, ceil, by_columns)?);
    }
    let y = scope.add(Op::MaxPool(MaxPool { kernel, window, ceil }), &[x])?;
    outputs[0] = Known::Value(scope.cast(y, dtype)?);
    Ok(outputs)
}

pub fn average_pool(scope: &mut Scope<'_>) -> Outputs {
    // avg_pool2d(self, …, count_include_pad, divisor_override): a number after the flag
    let arguments = ["aten.avg_pool2d", "aten.avg_pool3d"].iter().find_map(|name| scope.node.torch_arguments(name));
    if let Some([.., "True" | "False", divisor]) = arguments.as_deref()
        && divisor.parse::<i64>().is_ok()
    {
        return Err(LowerReason::Unsupported("a custom divisor, which PyTorch's exporter leaves out,".to_string()));
    }
    let x = scope.value(0)?;
    let (kernel, window, ceil) = pool_window(scope, x)?;
    let count_padding = scope.flag("count_include_pad", false)?;
    Ok(vec![Known::Value(scope.add(Op::AvgPool(AvgPool { kernel, window, ceil, count_padding }), &[x])?)])
}
