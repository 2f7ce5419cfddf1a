//! Wraps prose and fits tables to the width of a terminal, if there is one.

use crate::cli::stage_table::table;

/// Maximum width of a label; wrapped lines are indented to the text after the label.
const LABEL: usize = 24;

/// A step that makes a table narrower; steps are applied in order until it fits.
#[derive(Clone, Copy, Debug)]
pub enum Give {
    /// Cuts the cells of a column to this number of characters.
    Cut(usize, usize),
    /// Omits a column.
    Leave(usize),
}

/// Wraps lines wider than `width` between words; the rest is indented to the text after the label, if the line has one.
///
/// ```text
/// predicted      914.7 us per minibatch, 139,931
///                samples/s; bottleneck: compute
/// ```
pub fn folded(text: &str, width: Option<usize>) -> String {
    let Some(width) = width else { return text.to_string() };
    text.split('\n').map(|line| folded_line(line, width)).collect::<Vec<_>>().join("\n")
}

fn folded_line(line: &str, width: usize) -> String {
    let indent = under(line).min(width / 2);
    let (mut out, mut at) = (String::new(), 0);
    // Runs of spaces stay, because they align columns.
    for (place, word) in line.split(' ').enumerate() {
        let length = visible(word).count();
        if place > 0 && at + 1 + length > width && at > indent && length > 0 {
            out.truncate(out.trim_end().len());
            out += &format!("\n{}", " ".repeat(indent));
            at = indent;
        } else if place > 0 {
            out.push(' ');
            at += 1;
        }
        out += word;
        at += length;
    }
    out
}

/// Visible characters, without colour codes.
fn visible(text: &str) -> impl Iterator<Item = char> {
    let mut within = false;
    text.chars().filter(move |c| {
        let is_code = within || *c == '\u{1b}';
        within = is_code && *c != 'm';
        !is_code
    })
}

/// Column where the text after a label begins: after the last gap of two spaces near the line's beginning, else 0.
fn under(line: &str) -> usize {
    let mut found = 0;
    let chars: Vec<char> = visible(line).take(LABEL + 2).collect();
    for at in 2..chars.len() {
        if chars[at - 2] == ' ' && chars[at - 1] == ' ' && chars[at] != ' ' {
            found = at;
        }
    }
    found
}

/// A table ([`table`]) made narrower by `gives` until no line is wider than `width`; it names the omitted columns.
pub fn fitted(
    header: &[&str],
    right: &[usize],
    mut rows: Vec<Vec<String>>,
    gives: &[Give],
    width: Option<usize>,
) -> String {
    let is_narrow = |text: &str| width.is_none_or(|width| text.lines().all(|line| line.chars().count() <= width));
    let mut kept: Vec<usize> = (0..header.len()).collect();
    let drawn = |rows: &[Vec<String>], kept: &[usize]| {
        let cells = |row: &Vec<String>| kept.iter().filter_map(|column| row.get(*column).cloned()).collect();
        let heads: Vec<&str> = kept.iter().map(|column| header[*column]).collect();
        let right: Vec<usize> = (0..kept.len()).filter(|at| right.contains(&kept[*at])).collect();
        table(&heads, &right, rows.iter().map(cells).collect())
    };
    let mut text = drawn(&rows, &kept);
    for give in gives {
        if is_narrow(&text) {
            break;
        }
        match *give {
            Give::Cut(column, most) => {
                rows.iter_mut().filter_map(|row| row.get_mut(column)).for_each(|cell| cut(cell, most))
            }
            Give::Leave(column) => kept.retain(|other| *other != column),
        }
        text = drawn(&rows, &kept);
    }
    let left: Vec<&str> =
        (0..header.len()).filter(|column| !kept.contains(column)).map(|column| header[column]).collect();
    match left.is_empty() {
        true => text,
        false => text + &folded(&format!("without {}: this terminal is too narrow\n", left.join(", ")), width),
    }
}

fn cut(cell: &mut String, most: usize) {
    if cell.chars().count() > most {
        *cell = cell.chars().take(most.saturating_sub(1)).chain(['…']).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_go_on_under_what_follows_the_label() {
        let text = "predicted      914.7 us per minibatch, 139,931 samples/s\nshort line\n               --hidden --layers --heads";
        let wanted = "predicted      914.7 us per\n               minibatch, 139,931\n               samples/s\nshort line\n               \
                      --hidden --layers\n               --heads";
        assert_eq!(folded(text, Some(34)), wanted);
        assert_eq!(folded(text, None), text);
        // Colour codes have no width.
        let text = "      --loss <NAME>  \u{1b}[1mcross-entropy\u{1b}[0m, mse or bce";
        let wanted = "      --loss <NAME>  \u{1b}[1mcross-entropy\u{1b}[0m, mse or\n                     bce";
        assert_eq!(folded(text, Some(43)), wanted);
        // Words are never split.
        assert_eq!(folded("one extraordinarily long", Some(8)), "one\nextraordinarily\nlong");
    }

    #[test]
    fn a_table_gives_up_only_what_it_must() {
        let rows = vec![vec!["layer.0.attention".to_string(), "1.5 us".to_string(), "measured".to_string()]];
        let gives = [Give::Cut(0, 8), Give::Leave(2)];
        let at = |width| fitted(&["name", "time", "source"], &[1], rows.clone(), &gives, width);
        assert_eq!(at(None), at(Some(40)));
        assert!(at(None).contains("layer.0.attention  1.5 us  measured"), "{}", at(None));
        assert!(at(Some(30)).contains("layer.0…  1.5 us  measured"), "{}", at(Some(30)));
        let narrow = at(Some(20));
        assert!(narrow.contains("layer.0…  1.5 us\n") && narrow.contains("without source: "), "{narrow}");
        assert!(narrow.lines().all(|line| line.chars().count() <= 20), "{narrow}");
    }
}
