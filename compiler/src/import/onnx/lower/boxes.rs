//! `NonMaxSuppression`: among overlapping boxes keeps the one with the best score. The output size depends on values,
//! so the inputs must be constant.

use super::{Known, LowerReason, Outputs, Scope};
use crate::tensor::Tensor;

/// Maximum number of box comparisons.
const MOST: usize = 1 << 28;

/// Left, bottom, right, top.
type Bounds = [f64; 4];

/// `[batch, class, box]` of each selected box, sorted by descending score within a class.
pub fn non_max_suppression(scope: &mut Scope<'_>) -> Outputs {
    let what = "a parameter of box selection";
    let required = |slot| scope.tensor(slot, what)?.ok_or(LowerReason::Missing { slot });
    let (boxes, scores) = (required(0)?, required(1)?);
    let number = |slot| Ok::<_, LowerReason>(scope.tensor(slot, what)?.and_then(|t| t.to_f64().first().copied()));
    let max_per_class = number(2)?.unwrap_or(0.0).max(0.0) as usize;
    let overlap = number(3)?.unwrap_or(0.0);
    let score_threshold = number(4)?;
    let centred = scope.flag("center_point_box", false)?;
    let (&[batches, count, 4], &[also_batches, classes, also_count]) = (boxes.shape(), scores.shape()) else {
        return Err(LowerReason::Inputs(
            "boxes must have rank 3 with four numbers each, and scores rank 3".to_string(),
        ));
    };
    if batches != also_batches || count != also_count {
        return Err(LowerReason::Inputs(format!("scores {scores:?} do not fit the boxes {boxes:?}")));
    }
    let steps = [batches, classes, count, count.min(max_per_class)].into_iter().try_fold(1usize, usize::checked_mul);
    if steps.is_none_or(|steps| steps > MOST) {
        return Err(LowerReason::Unsupported(format!("a selection from {count} boxes for {classes} classes")));
    }
    let (bounds, scores) = (boxes.to_f64(), scores.to_f64());
    let bounds: Vec<Bounds> = bounds.chunks_exact(4).map(|b| corners([b[0], b[1], b[2], b[3]], centred)).collect();
    let mut selected: Vec<i64> = Vec::new();
    for batch in 0..batches {
        for class in 0..classes {
            let score = |at: usize| scores[(batch * classes + class) * count + at];
            let bounds = &bounds[batch * count..(batch + 1) * count];
            let mut order: Vec<usize> = (0..count)
                .filter(|&at| score_threshold.is_none_or(|score_threshold| score(at) > score_threshold))
                .collect();
            // A stable sort keeps boxes of equal score in index order.
            order.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
            let mut kept_boxes: Vec<usize> = Vec::new();
            for at in order {
                if kept_boxes.len() < max_per_class
                    && kept_boxes.iter().all(|&k| overlap_ratio(&bounds[at], &bounds[k]) <= overlap)
                {
                    kept_boxes.push(at);
                }
            }
            selected.extend(kept_boxes.into_iter().flat_map(|at| [batch, class, at].map(|v| v as i64)));
        }
    }
    Ok(vec![Known::Tensor(Tensor::from_i64(&[selected.len() / 3, 3], &selected))])
}

/// The bounds of a box given as two opposite corners `y, x, y, x`, or as centre `x, y` with width and height.
fn corners(coordinates: [f64; 4], centred: bool) -> Bounds {
    let [a, b, c, d] = coordinates;
    if centred {
        return [a - c / 2.0, b - d / 2.0, a + c / 2.0, b + d / 2.0];
    }
    [b.min(d), a.min(c), b.max(d), a.max(c)]
}

/// Intersection over union; 0 if either area is zero.
fn overlap_ratio(a: &Bounds, b: &Bounds) -> f64 {
    let area = |[left, bottom, right, top]: Bounds| (right - left).max(0.0) * (top - bottom).max(0.0);
    let common = area([a[0].max(b[0]), a[1].max(b[1]), a[2].min(b[2]), a[3].min(b[3])]);
    let union = area(*a) + area(*b) - common;
    if common > 0.0 && union > 0.0 { common / union } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_common_share_of_two_boxes() {
        let unit = corners([0.0, 0.0, 1.0, 1.0], false);
        assert_eq!(unit, corners([1.0, 1.0, 0.0, 0.0], false));
        assert_eq!(unit, corners([0.5, 0.5, 1.0, 1.0], true));
        assert_eq!(overlap_ratio(&unit, &unit), 1.0);
        assert_eq!(overlap_ratio(&unit, &corners([0.0, 0.5, 1.0, 1.5], false)), 1.0 / 3.0);
        assert_eq!(overlap_ratio(&unit, &corners([2.0, 2.0, 3.0, 3.0], false)), 0.0);
        assert_eq!(overlap_ratio(&unit, &[0.5, 0.5, 0.5, 0.5]), 0.0);
    }
}
