//! A D-Bus value as words, for people and for comparisons.

use zbus::zvariant::Value;

/// The value as a list of words: an array's elements each, a structure's fields each, anything else as one.
///
/// Booleans read `yes` and `no`, numbers as digits. An element that has parts itself is one word with its parts in it.
pub fn words(value: &Value<'_>) -> Vec<String> {
    match value {
        Value::Value(inner) => words(inner),
        Value::Array(array) => array.iter().map(|element| words(element).join(" ")).collect(),
        // `(bas)`: an allow-list or a deny-list, and its entries.
        Value::Structure(structure) => structure.fields().iter().flat_map(words).collect(),
        other => vec![word(other)],
    }
}

fn word(value: &Value<'_>) -> String {
    match value {
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::Str(text) => text.to_string(),
        Value::ObjectPath(path) => path.to_string(),
        Value::U8(number) => number.to_string(),
        Value::I16(number) => number.to_string(),
        Value::U16(number) => number.to_string(),
        Value::I32(number) => number.to_string(),
        Value::U32(number) => number.to_string(),
        Value::I64(number) => number.to_string(),
        Value::U64(number) => number.to_string(),
        Value::F64(number) => number.to_string(),
        other => format!("{other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_read_as_systemctl_shows_them() {
        let list: Vec<String> = vec!["a".into(), "b c".into()];
        assert_eq!(words(&Value::from(true)), ["yes"]);
        assert_eq!(words(&Value::from(-900_i32)), ["-900"]);
        assert_eq!(words(&Value::from(list.clone())), ["a", "b c"]);
        assert_eq!(words(&Value::from((false, list.clone()))), ["no", "a", "b c"]);
        assert_eq!(words(&Value::from(vec![("/a", list, false)])), ["/a a b c no"]);
        assert_eq!(words(&Value::from(Vec::<String>::new())), [""; 0]);
    }
}
