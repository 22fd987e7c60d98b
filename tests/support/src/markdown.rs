//! Tables and code in the pages under `docs/`, for those who hold a page to what it describes.

/// The cells of each row of a Markdown table whose header has this column, with the line the row is on.
///
/// Cells are trimmed. Tables without the column are passed over, and so are code blocks.
pub fn table_rows(text: &str, column: &str) -> Vec<(usize, Vec<String>)> {
    let mut rows = Vec::new();
    let (mut inside, mut in_block, mut previous) = (false, false, "");
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        in_block ^= line.starts_with("```");
        if in_block || !line.starts_with('|') {
            inside = false;
        } else if line.bytes().all(|byte| b"|-: ".contains(&byte)) {
            inside = cells(previous).iter().any(|cell| cell.eq_ignore_ascii_case(column));
        } else if inside {
            rows.push((number, cells(line)));
        }
        previous = line;
    }
    rows
}

/// The cells of one line; a `|` in backticks, or escaped, does not end one.
pub fn cells(line: &str) -> Vec<String> {
    let line = line.trim().trim_start_matches('|').trim_end_matches('|');
    let (mut cells, mut cell, mut in_code, mut escaped) = (Vec::new(), String::new(), false, false);
    for letter in line.chars() {
        in_code ^= letter == '`';
        if letter == '|' && !in_code && !escaped {
            cells.push(std::mem::take(&mut cell).trim().to_owned());
        } else {
            cell.push(letter);
        }
        escaped = letter == '\\' && !escaped;
    }
    cells.push(cell.trim().to_owned());
    cells
}

/// What stands between backticks.
pub fn code_spans(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tables_with_the_column_are_read() {
        let text =
            "| a | Test |\n|---|:--|\n| x | `p|q` |\n\n| b |\n|---|\n| y |\n```\n| a | Test |\n|-|-|\n| z | z |\n```\n";
        assert_eq!(table_rows(text, "test"), [(3, vec!["x".to_owned(), "`p|q`".to_owned()])]);
    }

    #[test]
    fn code_spans_are_every_second_part() {
        assert_eq!(code_spans("a `b` c `d e`.").collect::<Vec<_>>(), ["b", "d e"]);
    }
}
