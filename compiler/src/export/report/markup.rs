//! HTML tables and lists.

use crate::export::escape::escape;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// Left-aligned.
    Words,
    /// Right-aligned.
    Numbers,
}

/// An HTML table under construction. Cells are plain text and are escaped here.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<Column>,
    head: String,
    body: String,
}

impl Table {
    pub fn new(caption: &str, columns: &[(&str, Column)]) -> Table {
        let mut head = format!("<caption>{}</caption><thead><tr>", escape(caption));
        for (name, column) in columns {
            head += &format!("<th scope=\"col\"{}>{}</th>", class(*column), escape(name));
        }
        head += "</tr></thead>";
        Table { columns: columns.iter().map(|(_, column)| *column).collect(), head, body: String::new() }
    }

    /// Adds a row; its first cell is the row header.
    pub fn row<T: AsRef<str>>(&mut self, cells: &[T]) {
        self.marked_row("", cells);
    }

    pub fn marked_row<T: AsRef<str>>(&mut self, mark: &str, cells: &[T]) {
        self.body += &if mark.is_empty() { "<tr>".to_string() } else { format!("<tr class=\"{mark}\">") };
        for (at, (cell, column)) in cells.iter().zip(&self.columns).enumerate() {
            let (tag, scope) = if at == 0 { ("th", " scope=\"row\"") } else { ("td", "") };
            self.body += &format!("<{tag}{scope}{}>{}</{tag}>", class(*column), escape(cell.as_ref()));
        }
        self.body += "</tr>";
    }

    /// Adds a row with one cell over all columns.
    pub fn line(&mut self, mark: &str, text: &str) {
        let span = self.columns.len();
        self.body += &format!("<tr class=\"{mark}\"><td colspan=\"{span}\">{}</td></tr>", escape(text));
    }

    pub fn html(&self) -> String {
        format!("<div class=\"scroll\"><table>{}<tbody>{}</tbody></table></div>\n", self.head, self.body)
    }
}

fn class(column: Column) -> &'static str {
    match column {
        Column::Words => "",
        Column::Numbers => " class=\"n\"",
    }
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
