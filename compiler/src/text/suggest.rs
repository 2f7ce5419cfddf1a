//! Suggests the nearest known name for a mistyped one.
//!
//! The distance counts insertions, deletions, substitutions and swaps of neighbours (optimal string alignment). Distant
//! names are not suggested: a wrong suggestion is worse than none.

/// Characters compared per name; bounds the work on untrusted input.
const LOOKED_AT: usize = 64;

const MOST: usize = 20_000;

/// The first nearest of `candidates`; `None` if all are distant.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = name.to_lowercase();
    let distance_to = |other: &str| distance(&lower, &other.to_lowercase());
    let others = candidates.into_iter().take(MOST).filter(|other| !other.is_empty() && *other != name);
    let (distance_to, nearest) = others.map(|other| (distance_to(other), other)).min()?;
    // If all characters of a short name differ, it has nothing in common with the suggestion.
    let length = name.chars().count().min(nearest.chars().count());
    (distance_to <= 1 + length / 3 && distance_to < length.max(1)).then_some(nearest)
}

/// [`nearest`] as a suffix: "; did you mean `speed`?", or empty.
pub fn hint<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(name, known).map_or(String::new(), |name_found| format!("; did you mean `{}`?", name_found.escape_debug()))
}

fn distance(left: &str, right: &str) -> usize {
    let [left, right] = [left, right].map(|text| text.chars().take(LOOKED_AT).collect::<Vec<_>>());
    let mut previous = vec![0; right.len() + 1];
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, from) in left.iter().enumerate() {
        let mut next = vec![i + 1];
        for (j, to) in right.iter().enumerate() {
            let is_swap = i > 0 && j > 0 && *from == right[j - 1] && left[i - 1] == *to;
            let swap_cost = if is_swap { previous[j - 1] + 1 } else { usize::MAX };
            next.push((row[j] + usize::from(from != to)).min(row[j + 1] + 1).min(next[j] + 1).min(swap_cost));
        }
        previous = std::mem::replace(&mut row, next);
    }
    row[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_far_apart_as_their_edits() {
        for (left, right, edits) in [
            ("fc.weight", "fc.weight", 0),
            ("fc.wieght", "fc.weight", 1),
            ("", "abc", 3),
            ("abc", "", 3),
            ("kitten", "sitting", 3),
            ("ca", "abc", 3),
        ] {
            assert_eq!(distance(left, right), edits, "{left} {right}");
        }
    }

    #[test]
    fn only_near_names_are_offered() {
        let names = ["latency", "bandwidth", "count", "name"];
        assert_eq!(nearest("latnecy", names), Some("latency"));
        assert_eq!(nearest("Bandwith", names), Some("bandwidth"));
        assert_eq!(nearest("colour", names), None);
        assert_eq!(nearest("xy", ["ab", "x"]), None);
        assert_eq!(hint("naem", names), "; did you mean `name`?");
        assert_eq!(hint("naem", []), "");
    }
}
