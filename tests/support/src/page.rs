//! Commands out of documents, so that a test runs what a reader is told to.

/// The block of code below the line `<!-- rehearsed: NAME -->`, if there is exactly one.
pub fn block(page: &str, name: &str) -> Option<String> {
    let mark = format!("<!-- rehearsed: {name} -->\n```sh\n");
    let mut parts = page.split(mark.as_str()).skip(1);
    let (block, _) = parts.next()?.split_once("```\n")?;
    parts.next().is_none().then(|| block.to_owned())
}

/// The names of all such blocks.
pub fn names(page: &str) -> Vec<&str> {
    page.lines().filter_map(|line| line.strip_prefix("<!-- rehearsed: ")?.strip_suffix(" -->")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "text\n<!-- rehearsed: a -->\n```sh\none\ntwo\n```\nmore\n<!-- rehearsed: b -->\n```sh\n```\n";

    #[test]
    fn a_block_is_found_by_its_name_if_it_has_one_place() {
        assert_eq!(block(PAGE, "a").as_deref(), Some("one\ntwo\n"));
        assert_eq!(block(PAGE, "b").as_deref(), Some(""));
        assert_eq!(block(PAGE, "c"), None);
        assert_eq!(block(&PAGE.repeat(2), "a"), None);
        assert_eq!(names(PAGE), ["a", "b"]);
    }
}
