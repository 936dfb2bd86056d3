//! Rust source with what is not code taken out.

/// `text` with comments, strings and character literals blanked; line breaks stay where they are.
pub fn code_only(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let bytes = match first {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => rest.find("*/").map_or(rest.len(), |end| end + 2),
            '"' => quoted_bytes(rest, 1, '"'),
            'r' if raw_hashes(rest).is_some() && !ends_in_word(&code) => raw_bytes(rest),
            '\'' => character_bytes(rest),
            _ => 0,
        };
        if bytes == 0 {
            code.push(first);
            rest = &rest[first.len_utf8()..];
        } else {
            code.extend(rest[..bytes].chars().filter(|&c| c == '\n'));
            code.push(' ');
            rest = &rest[bytes..];
        }
    }
    code
}

/// Length of a literal that begins at 0, whose content begins at `at` and ends with an unescaped `end`.
fn quoted_bytes(text: &str, at: usize, end: char) -> usize {
    let mut escaped = false;
    for (index, c) in text[at..].char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == end => return at + index + end.len_utf8(),
            _ => {}
        }
    }
    text.len()
}

/// Length of a character literal, or 0 where the quote begins a lifetime.
fn character_bytes(text: &str) -> usize {
    let mut characters = text.char_indices().skip(1);
    match (characters.next(), characters.next()) {
        (Some((_, '\\')), _) => quoted_bytes(text, 1, '\''),
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 0,
    }
}

fn raw_hashes(text: &str) -> Option<usize> {
    let hashes = text[1..].chars().take_while(|&c| c == '#').count();
    text[1 + hashes..].starts_with('"').then_some(hashes)
}

fn raw_bytes(text: &str) -> usize {
    let hashes = raw_hashes(text).expect("a raw string begins here");
    let end = format!("\"{}", "#".repeat(hashes));
    let at = 2 + hashes;
    text[at..].find(&end).map_or(text.len(), |found| at + found + end.len())
}

fn ends_in_word(code: &str) -> bool {
    code.ends_with(|c: char| c.is_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::code_only;

    #[track_caller]
    fn check(text: &str, expected: &str) {
        assert_eq!(code_only(text).split_whitespace().collect::<Vec<_>>().join(" "), expected);
    }

    #[test]
    fn what_is_not_code_is_blanked() {
        check("a // unsafe\nb", "a b");
        check("a /* unsafe\n */ b", "a b");
        check(r#"f("unsafe \" {", 1)"#, "f( , 1)");
        check("f(r#\"unsafe \" {\"#, 1)", "f( , 1)");
        check("for 'a: '\\'' '\"' x", "for 'a: x");
        check("fn f<'a>(x: &'a str) { unsafe { g() } }", "fn f<'a>(x: &'a str) { unsafe { g() } }");
    }

    #[test]
    fn lines_keep_their_numbers() {
        assert_eq!(code_only("/* a\nb */ \"c\nd\" e").lines().count(), 3);
    }
}
