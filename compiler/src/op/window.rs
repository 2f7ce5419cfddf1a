//! The number of windows over the spatial axes, and the elements of each.
//!
//! Along one axis, a kernel of `k` elements with dilation `d` spans `d (k - 1) + 1` elements. Over a size `n` with
//! padding `b` before and `e` after it, with stride `s`, there are
//!
//!   floor((n + b + e - d (k - 1) - 1) / s) + 1
//!
//! windows. With `ceil` the quotient is rounded up, unless the last window would start beyond `n + b` (the rule of
//! PyTorch and ONNX). Tap `t` of window `o` reads element `o s + t d - b`.
//!
//! Attributes come from untrusted files, so all arithmetic is checked.

use super::*;

impl Window {
    /// A window with stride 1 over `rank` spatial axes, without padding or dilation.
    pub fn plain(rank: usize) -> Window {
        Window { strides: vec![1; rank], pads_begin: vec![0; rank], pads_end: vec![0; rank], dilations: vec![1; rank] }
    }

    /// The number of windows along each spatial axis.
    pub fn output(&self, spatial: &[Dim], kernel: &[Dim], ceil: bool) -> Result<Vec<Dim>, FactError> {
        let rank = spatial.len();
        let lists = [
            ("the list of strides", self.strides.len()),
            ("the list of pads at the begin", self.pads_begin.len()),
            ("the list of pads at the end", self.pads_end.len()),
            ("the list of dilations", self.dilations.len()),
            ("the kernel", kernel.len()),
        ];
        for (what, got) in lists {
            if got != rank {
                return Err(FactError::Rank { what, expected: format!("{rank}, as the spatial dims"), got });
            }
        }
        (0..rank).map(|axis| self.output_size(axis, &spatial[axis], &kernel[axis], ceil)).collect()
    }

    fn output_size(&self, axis: usize, size: &Dim, kernel: &Dim, ceil: bool) -> Result<Dim, FactError> {
        let attribute = |text: String| Err(FactError::Attribute(format!("{text} (spatial dim {axis})")));
        let stride = number("stride", self.strides[axis])?;
        let dilation = number("dilation", self.dilations[axis])?;
        let begin = number("padding", self.pads_begin[axis])?;
        let end = number("padding", self.pads_end[axis])?;
        if stride.is(0) || dilation.is(0) {
            return attribute(format!("stride {stride} and dilation {dilation} must be at least 1"));
        }
        if kernel.known().is_some_and(|k| k < 1) {
            return attribute(format!("kernel size {kernel} is below 1"));
        }
        if size.known().is_some_and(|n| n < 0) {
            return attribute(format!("spatial size {size} is negative"));
        }
        let one = Dim::from(1i64);
        let span = kernel.sub(&one)?.mul(&dilation)?.add(&one)?;
        let padded = size.add(&begin)?.add(&end)?;
        let room = padded.sub(&span)?;
        if room.known().is_some_and(|r| r < 0) {
            return attribute(format!("kernel of size {kernel} spans {span} elements, the padded input has {padded}"));
        }
        let (floor, remainder) = divide(&room, &stride)?;
        if !ceil {
            return Ok(floor.add(&one)?);
        }
        let last = if remainder == 0 { floor } else { floor.add(&one)? };
        // Distance of the last window's start from the end of the data.
        let overhang = last.mul(&stride)?.sub(&size.add(&begin)?)?;
        match overhang.known() {
            Some(b) if b >= 0 => Ok(last),
            Some(_) => Ok(last.add(&one)?),
            None => attribute(format!(
                "rounding up with stride {stride} has no exact output size for an input of \
                {size}"
            )),
        }
    }

    /// The element of an axis of `size` that window `at` reads at `tap`, or `None` in the padding.
    pub fn element(&self, axis: usize, at: usize, tap: usize, size: usize) -> Option<usize> {
        let position = self.padded_position(axis, at, tap).checked_sub(self.pads_begin[axis])?;
        (position < size).then_some(position)
    }

    /// The same position, counted from the start of the padding.
    pub fn padded_position(&self, axis: usize, at: usize, tap: usize) -> usize {
        // Saturates: an overflow lies beyond any data.
        let start = at.saturating_mul(self.strides[axis]);
        start.saturating_add(tap.saturating_mul(self.dilations[axis]))
    }

    /// The elements of the window at `at`: pairs of flat tap index and flat spatial index.
    pub fn taps(&self, at: &[usize], kernel: &[usize], spatial: &[usize]) -> Vec<(usize, usize)> {
        let mut taps = vec![(0, 0)];
        for axis in 0..spatial.len() {
            let axis_taps: Vec<(usize, usize)> = (0..kernel[axis])
                .filter_map(|tap| Some((tap, self.element(axis, at[axis], tap, spatial[axis])?)))
                .collect();
            taps = taps
                .iter()
                .flat_map(|(t, e)| {
                    axis_taps.iter().map(move |(tap, el)| (t * kernel[axis] + tap, e * spatial[axis] + el))
                })
                .collect();
        }
        taps
    }
}

/// A size from a file as a dim.
pub(super) fn number(what: &str, value: usize) -> Result<Dim, FactError> {
    let value = i64::try_from(value).map_err(|_| FactError::Attribute(format!("{what} {value} is too large")))?;
    Ok(Dim::from(value))
}

/// `floor(a / b)` for a positive `b`, and the remainder. A symbolic `a` is divisible if its remainder is the same for
/// all symbol values: `2*h-1` by 2 is `h-1`, remainder 1.
fn divide(a: &Dim, b: &Dim) -> Result<(Dim, i64), FactError> {
    if let (Some(a), Some(b)) = (a.known(), b.known()) {
        return Ok((Dim::from(a.div_euclid(b)), a.rem_euclid(b)));
    }
    let exact = a.div_exact(b);
    // Real strides are small; larger ones are not worth the search.
    for remainder in 1..b.known().filter(|_| exact.is_err()).unwrap_or(1).min(64) {
        if let Ok(quotient) = a.sub(&Dim::from(remainder)).and_then(|a| a.div_exact(b)) {
            return Ok((quotient, remainder));
        }
    }
    Ok((exact?, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn along(
        size: impl Into<Dim>,
        kernel: i64,
        stride: usize,
        pads: [usize; 2],
        dilation: usize,
        ceil: bool,
    ) -> String {
        let window = Window {
            strides: vec![stride],
            pads_begin: vec![pads[0]],
            pads_end: vec![pads[1]],
            dilations: vec![dilation],
        };
        match window.output(&[size.into()], &[Dim::from(kernel)], ceil) {
            Ok(sizes) => sizes[0].to_string(),
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn sizes_follow_the_formula() {
        assert_eq!(along(224i64, 7, 2, [3, 3], 1, false), "112");
        assert_eq!(along(10i64, 3, 1, [0, 0], 2, false), "6");
        assert_eq!(along(5i64, 2, 2, [0, 0], 1, false), "2");
        assert_eq!(along(5i64, 2, 2, [0, 0], 1, true), "3");
        // With `ceil`, the last window would start in the padding at the end.
        assert_eq!(along(4i64, 1, 3, [0, 1], 1, true), "2");
        assert_eq!(along(3i64, 2, 2, [1, 1], 1, true), "2");
        assert_eq!(along(2i64, 2, 2, [1, 1], 1, true), "2");
    }

    #[test]
    fn symbols_stay_exact_where_the_rest_is_known() {
        let h = Dim::symbol("h");
        let twice = h.mul(&Dim::from(2i64)).unwrap();
        assert_eq!(along(h.clone(), 3, 1, [1, 1], 1, false), "h");
        assert_eq!(along(h.clone(), 3, 1, [1, 1], 1, true), "h");
        assert_eq!(along(twice.clone(), 3, 2, [1, 1], 1, false), "h");
        assert_eq!(along(twice, 2, 2, [0, 0], 1, false), "h");
        assert_eq!(along(h, 3, 2, [1, 1], 1, false), "h-1 is not divisible by 2");
    }

    #[test]
    fn hostile_attributes_are_errors() {
        assert!(along(5i64, 2, 0, [0, 0], 1, false).contains("stride 0"));
        assert!(along(5i64, 2, usize::MAX, [0, 0], 1, false).contains("stride 18446744073709551615 is too large"));
        assert!(along(5i64, 2, 1, [0, 0], 0, false).contains("dilation 0"));
        assert!(along(5i64, 0, 1, [0, 0], 1, false).contains("kernel size 0"));
        assert!(
            along(5i64, 9, 1, [1, 2], 1, false).contains("kernel of size 9 spans 9 elements, the padded input has 8")
        );
        assert!(along(5i64, i64::MAX, 1, [0, 0], 3, false).contains("overflows"));
        assert!(along(5i64, 2, 1, [i64::MAX as usize, 0], 1, false).contains("overflows"));
        assert!(along(-5i64, 2, 1, [9, 9], 1, false).contains("negative"));
        let no_strides = Window { strides: vec![], ..Window::plain(1) };
        let error = no_strides.output(&[Dim::from(5i64)], &[Dim::from(2i64)], false).unwrap_err();
        assert_eq!(error.to_string(), "the list of strides has rank 0, expected 1, as the spatial dims");
    }

    #[test]
    fn taps_are_flat_and_leave_the_padding_out() {
        let window = Window { pads_begin: vec![1, 0], ..Window::plain(2) };
        assert_eq!(window.taps(&[0, 1], &[2, 2], &[3, 4]), [(2, 1), (3, 2)]);
    }
}
