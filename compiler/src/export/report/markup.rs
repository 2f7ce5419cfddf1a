//! HTML tables and lists.

use crate::export::escape::escape;

/// An HTML table under construction. Cells are plain text and are escaped here.
#[derive(Clone, Debug)]
pub struct Table {
    /// For each column, true if it is aligned to the right.
    right: Vec<bool>,
    head: String,
    body: String,
}

impl Table {
    /// The columns in `right` are aligned to the right.
    pub fn new(caption: &str, header: &[&str], right: &[usize]) -> Table {
        let right: Vec<bool> = (0..header.len()).map(|at| right.contains(&at)).collect();
        let mut head = format!("<caption>{}</caption><thead><tr>", escape(caption));
        for (name, is_right) in header.iter().zip(&right) {
            head += &format!("<th scope=\"col\"{}>{}</th>", class(*is_right), escape(name));
        }
        head += "</tr></thead>";
        Table { right, head, body: String::new() }
    }

    /// Adds a row; its first cell is the row header.
    pub fn row<T: AsRef<str>>(&mut self, cells: &[T]) {
        self.marked_row("", cells);
    }

    pub fn marked_row<T: AsRef<str>>(&mut self, mark: &str, cells: &[T]) {
        self.body += &if mark.is_empty() { "<tr>".to_string() } else { format!("<tr class=\"{mark}\">") };
        for (at, (cell, is_right)) in cells.iter().zip(&self.right).enumerate() {
            let (tag, scope) = if at == 0 { ("th", " scope=\"row\"") } else { ("td", "") };
            self.body += &format!("<{tag}{scope}{}>{}</{tag}>", class(*is_right), escape(cell.as_ref()));
        }
        self.body += "</tr>";
    }

    /// Adds a row with one cell over all columns.
    pub fn line(&mut self, mark: &str, text: &str) {
        let span = self.right.len();
        self.body += &format!("<tr class=\"{mark}\"><td colspan=\"{span}\">{}</td></tr>", escape(text));
    }

    pub fn html(&self) -> String {
        format!("<div class=\"scroll\"><table>{}<tbody>{}</tbody></table></div>\n", self.head, self.body)
    }
}

fn class(is_right: bool) -> &'static str {
    if is_right { " class=\"n\"" } else { "" }
}

pub fn paragraph(class: &str, text: &str) -> String {
    let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
    format!("<p{class}>{}</p>\n", escape(text))
}

/// A description list.
pub fn list<T: AsRef<str>>(entries: &[(&str, T)]) -> String {
    let entries = entries
        .iter()
        .map(|(name, value)| format!("<div><dt>{}</dt><dd>{}</dd></div>", escape(name), escape(value.as_ref())));
    format!("<dl>{}</dl>\n", entries.collect::<String>())
}

/// A picture that scrolls horizontally on narrow pages.
pub fn figure(picture: &str) -> String {
    format!("<div class=\"scroll\" tabindex=\"0\">{picture}</div>\n")
}

pub fn details(summary: &str, inside: &str) -> String {
    format!("<details><summary>{}</summary>{inside}</details>\n", escape(summary))
}
