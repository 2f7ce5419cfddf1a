//! SVG writer: shapes with CSS classes, coloured by a style sheet.
//!
//! Numbers have at most two decimals, so that pictures are byte-identical on all machines. All text is escaped here and
//! nowhere else.

use crate::export::axis::Axis;
use crate::export::colour::{PICTURE, light};
use crate::export::escape::escape;
use std::fmt::Write;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Svg {
    width: f64,
    height: f64,
    title: String,
    body: String,
}

impl Svg {
    /// An empty picture with a size in pixels. `title` is its accessible description.
    pub fn new(width: f64, height: f64, title: &str) -> Svg {
        Svg { width, height, title: title.to_string(), body: String::new() }
    }

    pub fn rect(&mut self, class: &str, [x, y, width, height]: [f64; 4], hint: Option<&str>) {
        let (x, y, width, height) = (number(x), number(y), number(width.max(0.0)), number(height.max(0.0)));
        let _ = write!(self.body, "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"");
        self.close("rect", hint);
    }

    pub fn rounded_rect(&mut self, class: &str, [x, y, width, height]: [f64; 4], radius: f64) {
        let (x, y, width, height) = (number(x), number(y), number(width.max(0.0)), number(height.max(0.0)));
        let radius = number(radius);
        let _ = write!(
            self.body,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"{radius}\"/>"
        );
    }

    pub fn line(&mut self, class: &str, [x1, y1]: [f64; 2], [x2, y2]: [f64; 2]) {
        let (x1, y1, x2, y2) = (number(x1), number(y1), number(x2), number(y2));
        let _ = write!(self.body, "<line class=\"{class}\" x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\"/>");
    }

    pub fn path(&mut self, class: &str, points: &[[f64; 2]], is_closed: bool) {
        if points.is_empty() {
            return;
        }
        let _ = write!(self.body, "<path class=\"{class}\" d=\"");
        for (at, [x, y]) in points.iter().enumerate() {
            let _ = write!(self.body, "{}{} {}", if at == 0 { 'M' } else { 'L' }, number(*x), number(*y));
        }
        self.body += if is_closed { "Z\"/>" } else { "\"/>" };
    }

    /// Many rectangles of one class as a single path, which is smaller and faster to draw.
    pub fn blocks(&mut self, class: &str, blocks: &[[f64; 4]]) {
        if blocks.is_empty() {
            return;
        }
        // It has no tooltip and must not hide those below it.
        let _ = write!(self.body, "<path class=\"{class}\" pointer-events=\"none\" d=\"");
        for [x, y, width, height] in blocks {
            let (x, y, width, height) = (number(*x), number(*y), number(width.max(0.0)), number(height.max(0.0)));
            let _ = write!(self.body, "M{x} {y}h{width}v{height}h-{width}z");
        }
        self.body += "\"/>";
    }

    pub fn circle(&mut self, class: &str, [x, y]: [f64; 2], radius: f64, hint: Option<&str>) {
        let (x, y, radius) = (number(x), number(y), number(radius));
        let _ = write!(self.body, "<circle class=\"{class}\" cx=\"{x}\" cy=\"{y}\" r=\"{radius}\"");
        self.close("circle", hint);
    }

    pub fn text(&mut self, class: &str, anchor: Anchor, [x, y]: [f64; 2], text: &str) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let (x, y, text) = (number(x), number(y), escape(text));
        let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
        let _ = write!(self.body, "<text{class}{anchor} x=\"{x}\" y=\"{y}\">{text}</text>");
    }

    /// A line and a label at every tick of a horizontal axis; `x` places values. A label stays within the picture.
    pub fn vertical_grid(&mut self, axis: &Axis, x: &dyn Fn(f64) -> f64, [top, bottom]: [f64; 2]) {
        for (value, label) in &axis.ticks {
            let x = x(*value);
            self.line("grid", [x, top], [x, bottom]);
            let is_cut = x + width(label, 11.0) / 2.0 > self.width;
            let (anchor, label_x) = if is_cut { (Anchor::End, self.width) } else { (Anchor::Middle, x) };
            self.text("quiet small figure", anchor, [label_x, bottom + 17.0], label);
        }
    }

    /// The class and the name of each kind of shape, in a row at the top from `x` on.
    pub fn legend<'a>(&mut self, mut x: f64, kinds: impl IntoIterator<Item = (impl AsRef<str>, &'a str)>) {
        for (class, name) in kinds {
            self.rounded_rect(class.as_ref(), [x, 4.0, 12.0, 12.0], 2.0);
            self.text("quiet small", Anchor::Start, [x + 18.0, 14.0], name);
            x += 18.0 + width(name, 11.0) + 20.0;
        }
    }

    fn close(&mut self, tag: &str, hint: Option<&str>) {
        match hint {
            Some(hint) => {
                let lines: Vec<String> = hint.split('\n').map(escape).collect();
                let _ = write!(self.body, "><title>{}</title></{tag}>", lines.join("\n"));
            }
            None => self.body += "/>",
        }
    }

    /// For embedding in a page that has the style sheet.
    pub fn inline(&self) -> String {
        format!("{}{}</svg>\n", self.open(""), self.body)
    }

    /// A standalone SVG file with a white background.
    pub fn file(&self) -> String {
        let (width, height) = (number(self.width), number(self.height));
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n{}<title>{}</title><style>{}</style>\
             <rect fill=\"#ffffff\" width=\"{width}\" height=\"{height}\"/>{}</svg>\n",
            self.open(" xmlns=\"http://www.w3.org/2000/svg\""),
            escape(&self.title),
            light(PICTURE),
            self.body
        )
    }

    fn open(&self, attributes: &str) -> String {
        let (width, height, title) = (number(self.width), number(self.height), escape(&self.title));
        format!(
            "<svg{attributes} width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{title}\">"
        )
    }
}

/// Formats a number with at most two decimals, without trailing zeros.
fn number(value: f64) -> String {
    if !value.is_finite() {
        return "0".to_string();
    }
    let text = format!("{value:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_string() } else { text.to_string() }
}

/// Approximate width of a text in pixels, independent of the font; precise enough for layout.
pub fn width(text: &str, size: f64) -> f64 {
    let letter = |c: char| match c {
        'i' | 'j' | 'l' | '.' | ',' | '\'' | '|' | ':' | ';' | 'I' => 0.28,
        ' ' | 'f' | 'r' | 't' | '-' | '(' | ')' | '/' => 0.36,
        'm' | 'w' | 'M' | 'W' => 0.86,
        'A'..='Z' => 0.66,
        c if (c as u32) < 0x2e80 => 0.56,
        _ => 1.0,
    };
    text.chars().map(letter).sum::<f64>() * size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_names_are_safe() {
        assert_eq!([0.0, -0.001, 1.0, 2.5, 3.14459, f64::NAN].map(number), ["0", "0", "1", "2.5", "3.14", "0"]);
        let mut picture = Svg::new(10.0, 20.0, "a \"picture\"");
        picture.text("", Anchor::Start, [1.0, 2.0], "<script>\u{7}");
        picture.rect("forward", [0.0, 0.0, 1.0, -1.0], Some("</title>"));
        let text = picture.file();
        assert!(text.contains("&lt;script&gt;</text>") && text.contains("<title>&lt;/title&gt;</title>"), "{text}");
        assert!(text.contains("aria-label=\"a &quot;picture&quot;\"") && text.contains("height=\"0\""), "{text}");
    }
}
