//! Wraps prose and fits tables to the width of a terminal, if there is one.

use crate::cli::stage_table::table;

/// Maximum width of a label; wrapped lines are indented to the text after the label.
const MAX_LABEL_WIDTH: usize = 24;

/// A step that makes a table narrower; steps are applied in order until it fits.
#[derive(Clone, Copy, Debug)]
pub enum Shrink {
    /// Cuts the cells of a column to this number of characters.
    Cut(usize, usize),
    Omit(usize),
}

/// Wraps lines wider than `width` between words; the rest is indented to the text after the label, if the line has one.
///
/// ```text
/// predicted      914.7 us per minibatch, 139,931
///                samples/s; bottleneck: compute
/// ```
pub fn wrap(text: &str, width: Option<usize>) -> String {
    let Some(width) = width else { return text.to_string() };
    text.split('\n').map(|line| wrap_line(line, width)).collect::<Vec<_>>().join("\n")
}

fn wrap_line(line: &str, width: usize) -> String {
    let indent = label_indent(line).min(width / 2);
    let (mut out, mut at) = (String::new(), 0);
    // Runs of spaces stay, because they align columns.
    for (index, word) in line.split(' ').enumerate() {
        let length = visible(word).count();
        if index > 0 && at + 1 + length > width && at > indent && length > 0 {
            out.truncate(out.trim_end().len());
            out += &format!("\n{}", " ".repeat(indent));
            at = indent;
        } else if index > 0 {
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
    let mut in_code = false;
    text.chars().filter(move |c| {
        let is_code = in_code || *c == '\u{1b}';
        in_code = is_code && *c != 'm';
        !is_code
    })
}

/// Column where the text after a label begins: after the last gap of two spaces near the line's beginning, else 0.
fn label_indent(line: &str) -> usize {
    let mut indent = 0;
    let chars: Vec<char> = visible(line).take(MAX_LABEL_WIDTH + 2).collect();
    for at in 2..chars.len() {
        if chars[at - 2] == ' ' && chars[at - 1] == ' ' && chars[at] != ' ' {
            indent = at;
        }
    }
    indent
}

/// A table ([`table`]) made narrower by `shrinks` until no line is wider than `width`; it names the omitted columns.
pub fn fit_table(
    header: &[&str],
    right: &[usize],
    mut rows: Vec<Vec<String>>,
    shrinks: &[Shrink],
    width: Option<usize>,
) -> String {
    let mut columns: Vec<usize> = (0..header.len()).collect();
    let draw = |rows: &[Vec<String>], columns: &[usize]| {
        let cells = |row: &Vec<String>| columns.iter().filter_map(|column| row.get(*column).cloned()).collect();
        let titles: Vec<&str> = columns.iter().map(|column| header[*column]).collect();
        let right: Vec<usize> = (0..columns.len()).filter(|at| right.contains(&columns[*at])).collect();
        table(&titles, &right, rows.iter().map(cells).collect())
    };
    let mut text = draw(&rows, &columns);
    for shrink in shrinks {
        if fits(&text, width) {
            break;
        }
        match *shrink {
            Shrink::Cut(column, max_width) => {
                rows.iter_mut().filter_map(|row| row.get_mut(column)).for_each(|cell| truncate(cell, max_width))
            }
            Shrink::Omit(column) => columns.retain(|kept| *kept != column),
        }
        text = draw(&rows, &columns);
    }
    let omitted: Vec<&str> =
        (0..header.len()).filter(|column| !columns.contains(column)).map(|column| header[column]).collect();
    text + &omission(&omitted, width)
}

/// True if no line is wider than `width`.
pub fn fits(text: &str, width: Option<usize>) -> bool {
    width.is_none_or(|width| text.lines().all(|line| line.chars().count() <= width))
}

/// Names the columns that a narrow table omits.
pub fn omission(columns: &[&str], width: Option<usize>) -> String {
    match columns.is_empty() {
        true => String::new(),
        false => wrap(&format!("without {}: this terminal is too narrow\n", columns.join(", ")), width),
    }
}

/// Names what a long table leaves out.
pub fn folded_rows(rows: &str) -> String {
    format!("without {rows} that differ; `--format json` prints all\n")
}

fn truncate(cell: &mut String, max_width: usize) {
    if cell.chars().count() > max_width {
        *cell = cell.chars().take(max_width.saturating_sub(1)).chain(['…']).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_go_on_under_what_follows_the_label() {
        let text = "predicted      914.7 us per minibatch, 139,931 samples/s\nshort line\n               --hidden --layers --heads";
        let expected = "predicted      914.7 us per\n               minibatch, 139,931\n               samples/s\nshort line\n               \
                      --hidden --layers\n               --heads";
        assert_eq!(wrap(text, Some(34)), expected);
        assert_eq!(wrap(text, None), text);
        // Colour codes have no width.
        let text = "      --loss <NAME>  \u{1b}[1mcross-entropy\u{1b}[0m, mse or bce";
        let expected = "      --loss <NAME>  \u{1b}[1mcross-entropy\u{1b}[0m, mse or\n                     bce";
        assert_eq!(wrap(text, Some(43)), expected);
        // Words are never split.
        assert_eq!(wrap("one extraordinarily long", Some(8)), "one\nextraordinarily\nlong");
    }

    #[test]
    fn a_table_gives_up_only_what_it_must() {
        let rows = vec![vec!["layer.0.attention".to_string(), "1.5 us".to_string(), "measured".to_string()]];
        let shrinks = [Shrink::Cut(0, 8), Shrink::Omit(2)];
        let at = |width| fit_table(&["name", "time", "source"], &[1], rows.clone(), &shrinks, width);
        assert_eq!(at(None), at(Some(40)));
        assert!(at(None).contains("layer.0.attention  1.5 us  measured"), "{}", at(None));
        assert!(at(Some(30)).contains("layer.0…  1.5 us  measured"), "{}", at(Some(30)));
        let narrow = at(Some(20));
        assert!(narrow.contains("layer.0…  1.5 us\n") && narrow.contains("without source: "), "{narrow}");
        assert!(narrow.lines().all(|line| line.chars().count() <= 20), "{narrow}");
    }
}
