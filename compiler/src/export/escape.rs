//! Escaping of untrusted text for HTML and SVG.

use crate::text::name::{display_name, short_name};

/// Removes control and formatting characters and escapes markup. The result is safe between tags and between double
/// quotes.
///
/// ```
/// use compiler::export::escape::escape;
/// assert_eq!(escape("<b title=\"x\">&\u{1b}'\u{202e}"), "&lt;b title=&quot;x&quot;&gt;&amp;&#39;");
/// ```
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in display_name(text).chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            // Not allowed in XML; a file that contains one does not open.
            '\u{fffe}' | '\u{ffff}' => {}
            c => escaped.push(c),
        }
    }
    escaped
}

/// Shortens a name in the middle to at most `max_chars` characters. The result is not escaped.
pub fn short(name: &str, max_chars: usize) -> String {
    let name = short_name(name);
    let count = name.chars().count();
    if count <= max_chars {
        return name;
    }
    let head = max_chars.saturating_sub(1) / 2;
    let tail = max_chars.saturating_sub(1) - head;
    let start: String = name.chars().take(head).collect();
    let end: String = name.chars().skip(count - tail).collect();
    format!("{start}…{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_keep_both_ends() {
        assert_eq!(short("encoder.layer.0", 9), "enco…er.0");
        assert_eq!(short("abc", 3), "abc");
        assert_eq!(short("\u{202e}abc", 3), "abc");
    }
}
