//! As much of Rust as the layer check needs: words without comments, strings and test modules, and the paths in them.

/// Splits source text into names and punctuation. Comments and the contents of literals are left out; `::` is one token.
pub fn tokens(source: &str) -> Vec<String> {
    let letters: Vec<char> = source.chars().collect();
    let at = |index: usize| letters.get(index).copied().unwrap_or('\0');
    let mut tokens = Vec::new();
    let mut index = 0;
    while index < letters.len() {
        let letter = at(index);
        if letter == '/' && at(index + 1) == '/' {
            while index < letters.len() && at(index) != '\n' {
                index += 1;
            }
        } else if letter == '/' && at(index + 1) == '*' {
            index = after_block_comment(&letters, index);
        } else if letter == '"' {
            index = after_string(&letters, index);
            tokens.push("\"\"".to_owned());
        } else if letter == '\'' {
            index = after_quote(&letters, index);
        } else if is_name(letter) {
            let start = index;
            while is_name(at(index)) {
                index += 1;
            }
            let name: String = letters.get(start..index).unwrap_or_default().iter().collect();
            let raw = matches!(name.as_str(), "r" | "br" | "cr") && matches!(at(index), '"' | '#');
            match raw.then(|| after_raw_string(&letters, index)).flatten() {
                Some(end) => index = end,
                None => tokens.push(name),
            }
        } else if letter == ':' && at(index + 1) == ':' {
            tokens.push("::".to_owned());
            index += 2;
        } else {
            if !letter.is_whitespace() {
                tokens.push(letter.to_string());
            }
            index += 1;
        }
    }
    tokens
}

fn is_name(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

fn after_block_comment(letters: &[char], start: usize) -> usize {
    let at = |index: usize| letters.get(index).copied().unwrap_or('\0');
    let (mut depth, mut index) = (0, start);
    while index < letters.len() {
        match (at(index), at(index + 1)) {
            ('/', '*') => (depth, index) = (depth + 1, index + 2),
            ('*', '/') => (depth, index) = (depth - 1, index + 2),
            _ => index += 1,
        }
        if depth == 0 {
            break;
        }
    }
    index
}

fn after_string(letters: &[char], start: usize) -> usize {
    let mut index = start + 1;
    while let Some(letter) = letters.get(index) {
        match letter {
            '\\' => index += 2,
            '"' => return index + 1,
            _ => index += 1,
        }
    }
    index
}

/// `start` is at the first `#` or `"` after the `r`. `None`: a raw name such as `r#type`.
fn after_raw_string(letters: &[char], start: usize) -> Option<usize> {
    let hashes = letters.get(start..)?.iter().take_while(|&&letter| letter == '#').count();
    if letters.get(start + hashes) != Some(&'"') {
        return None;
    }
    let mut index = start + hashes + 1;
    while index < letters.len() {
        let closing = letters.get(index + 1..index + 1 + hashes);
        if letters.get(index) == Some(&'"')
            && closing.is_some_and(|closing| closing.iter().all(|&letter| letter == '#'))
        {
            return Some(index + 1 + hashes);
        }
        index += 1;
    }
    Some(index)
}

/// A character literal, or the quote of a lifetime alone.
fn after_quote(letters: &[char], start: usize) -> usize {
    match (letters.get(start + 1), letters.get(start + 2)) {
        (Some('\\'), _) => {
            let rest = letters.get(start + 3..).unwrap_or_default();
            start + 4 + rest.iter().position(|&letter| letter == '\'').unwrap_or(rest.len())
        }
        (Some(_), Some('\'')) => start + 3,
        _ => start + 1,
    }
}

/// The same tokens without `#[cfg(test)]` items that have a body.
pub fn without_tests(tokens: &[String]) -> Vec<String> {
    const MARK: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
    let mut kept = Vec::new();
    let mut index = 0;
    while let Some(token) = tokens.get(index) {
        let marked = tokens.get(index..index + MARK.len()).is_some_and(|window| window == MARK);
        if marked {
            index = after_item(tokens, index + MARK.len());
        } else {
            kept.push(token.clone());
            index += 1;
        }
    }
    kept
}

/// Behind the next `;`, or the next balanced pair of braces, whichever comes first.
fn after_item(tokens: &[String], start: usize) -> usize {
    let mut depth = 0;
    for (index, token) in (start..).zip(tokens.get(start..).unwrap_or_default()) {
        match token.as_str() {
            ";" if depth == 0 => return index + 1,
            "{" => depth += 1,
            "}" if depth == 1 => return index + 1,
            "}" => depth -= 1,
            _ => {}
        }
    }
    tokens.len()
}

/// Every path of two names or more, groups taken apart: `a::{b, c::d}` is `a::b` and `a::c::d`. Names after `use` count alone.
pub fn paths(tokens: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut index = 0;
    let mut after_use = false;
    while let Some(token) = tokens.get(index) {
        let starts_here = token.starts_with(is_name) || (after_use && token == "{");
        if starts_here && token != "use" {
            let before = found.len();
            index = path(tokens, index, &[], &mut found);
            if !after_use {
                let mut new = found.split_off(before);
                new.retain(|path| path.len() > 1);
                found.append(&mut new);
            }
            after_use = false;
        } else {
            // A leading `::` is no name.
            after_use = token == "use" || (after_use && token == "::");
            index += 1;
        }
    }
    found
}

/// Reads one path (or group) that starts at `index`; gives back the index behind it.
fn path(tokens: &[String], mut index: usize, prefix: &[String], found: &mut Vec<Vec<String>>) -> usize {
    let mut names = prefix.to_vec();
    loop {
        match tokens.get(index).map(String::as_str) {
            Some("{") => {
                index += 1;
                while tokens.get(index).is_some_and(|token| token != "}") {
                    let before = index;
                    index = path(tokens, index, &names, found);
                    // `,`, `as name`, and whatever a path cannot start with.
                    index = index.max(before + usize::from(index == before));
                }
                return index + 1;
            }
            Some(name) if name.starts_with(is_name) => names.push(name.to_owned()),
            _ => {
                if names.len() > prefix.len() || tokens.get(index).is_some_and(|token| token == "*") {
                    found.push(names);
                }
                return index;
            }
        }
        index += 1;
        let goes_on = tokens.get(index).is_some_and(|token| token == "::")
            && tokens.get(index + 1).is_some_and(|token| token.starts_with(is_name) || token == "{");
        if !goes_on {
            found.push(names);
            return index;
        }
        index += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths_of(source: &str) -> Vec<String> {
        paths(&without_tests(&tokens(source))).iter().map(|path| path.join("::")).collect()
    }

    #[test]
    fn groups_are_taken_apart() {
        let source = "use crate::{limits, frame::{Header, message::Start as S}};\nuse zbus;\nuse ::smol::block_on;";
        let expected = ["crate::limits", "crate::frame::Header", "crate::frame::message::Start"];
        let paths = paths_of(source);
        assert!(expected.iter().all(|path| paths.contains(&(*path).to_owned())), "{paths:?}");
        assert!(paths.contains(&"zbus".to_owned()) && paths.contains(&"smol::block_on".to_owned()), "{paths:?}");
    }

    #[test]
    fn paths_in_code_are_seen_and_in_text_are_not() {
        let source = r##"
            // crate::comment::x
            /* crate::block /* nested */ ::y */
            fn f<'a>(x: &'a str) { let _ = "crate::text::z"; let c = '"'; crate::code::g('\''); let _ = r#"crate::raw::"q"#; }
            #[derive(argh::FromArgs)]
        "##;
        assert_eq!(paths_of(source), ["crate::code::g", "argh::FromArgs"]);
    }

    #[test]
    fn test_modules_are_left_out_and_what_follows_is_not() {
        let source = "#[cfg(test)]\nmod tests { fn a() { crate::x::y(); } }\nfn b() { crate::z::w(); }\n#[cfg(test)] mod t;\nuse crate::v::u;";
        assert_eq!(paths_of(source), ["crate::z::w", "crate::v::u"]);
    }
}
