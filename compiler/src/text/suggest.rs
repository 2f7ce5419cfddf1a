//! Suggests the nearest known name for a mistyped one.
//!
//! The distance counts insertions, deletions, substitutions and swaps of neighbours (optimal string alignment). Distant
//! names are not suggested: a wrong suggestion is worse than none.

/// Characters compared per name; bounds the work on untrusted input.
const LOOKED_AT: usize = 64;

const MOST: usize = 20_000;

/// The first nearest of `known`; `None` if all are distant.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = name.to_lowercase();
    let far = |other: &str| distance(&lower, &other.to_lowercase());
    let all = known.into_iter().take(MOST).filter(|other| !other.is_empty() && *other != name);
    let (far, found) = all.map(|other| (far(other), other)).min()?;
    // If all characters of a short name differ, it has nothing in common with the suggestion.
    let length = name.chars().count().min(found.chars().count());
    (far <= 1 + length / 3 && far < length.max(1)).then_some(found)
}

/// [`nearest`] as a suffix: "; did you mean `speed`?", or empty.
pub fn hint<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(name, known).map_or(String::new(), |found| format!("; did you mean `{}`?", found.escape_debug()))
}

fn distance(left: &str, right: &str) -> usize {
    let [left, right] = [left, right].map(|text| text.chars().take(LOOKED_AT).collect::<Vec<_>>());
    let mut before = vec![0; right.len() + 1];
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, from) in left.iter().enumerate() {
        let mut next = vec![i + 1];
        for (j, to) in right.iter().enumerate() {
            let swaps = i > 0 && j > 0 && *from == right[j - 1] && left[i - 1] == *to;
            let swapped = if swaps { before[j - 1] + 1 } else { usize::MAX };
            next.push((row[j] + usize::from(from != to)).min(row[j + 1] + 1).min(next[j] + 1).min(swapped));
        }
        before = std::mem::replace(&mut row, next);
    }
    row[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_far_apart_as_their_edits() {
        for (left, right, far) in [
            ("fc.weight", "fc.weight", 0),
            ("fc.wieght", "fc.weight", 1),
            ("", "abc", 3),
            ("abc", "", 3),
            ("kitten", "sitting", 3),
            ("ca", "abc", 3),
        ] {
            assert_eq!(distance(left, right), far, "{left} {right}");
        }
    }

    #[test]
    fn only_near_names_are_offered() {
        let known = ["latency", "bandwidth", "count", "name"];
        assert_eq!(nearest("latnecy", known), Some("latency"));
        assert_eq!(nearest("Bandwith", known), Some("bandwidth"));
        assert_eq!(nearest("colour", known), None);
        assert_eq!(nearest("xy", ["ab", "x"]), None);
        assert_eq!(hint("naem", known), "; did you mean `name`?");
        assert_eq!(hint("naem", []), "");
    }
}
