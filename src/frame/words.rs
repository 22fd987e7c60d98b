//! Command words as text that survives an argument list and an environment variable.
//!
//! A word is the letter `a` and then unpadded URL-safe base64 of its bytes, so that an empty word is `a` and no
//! word begins with a dash. The client takes words as arguments; the launcher hands them to inner-exec joined by
//! dots. Decoding is canonical: what does not re-encode to itself is refused, so each list has one spelling.

use super::DecodeError;
use super::message::Words;
use crate::limits::{ARG_BYTES_MAX, ARGS_MAX};

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// One word, encoded.
pub fn encode_word(word: &str) -> String {
    let letter = |bits: u32| char::from(*ALPHABET.get((bits & 63) as usize).expect("six bits index 64 letters"));
    let mut text = String::with_capacity(1 + word.len().div_ceil(3) * 4);
    text.push('a');
    for chunk in word.as_bytes().chunks(3) {
        let bits = chunk.iter().fold(0, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for index in 0..=chunk.len() {
            text.push(letter(bits >> (18 - 6 * index)));
        }
    }
    text
}

/// One word, decoded; `None` unless it is spelled canonically, is UTF-8 and not longer than any word may be.
pub fn decode_word(text: &str) -> Option<String> {
    let letters = text.strip_prefix('a')?;
    if letters.len() > (ARG_BYTES_MAX * 4).div_ceil(3) || letters.len() % 4 == 1 {
        return None;
    }
    let mut bytes = Vec::with_capacity(letters.len() / 4 * 3 + 2);
    for chunk in letters.as_bytes().chunks(4) {
        let mut bits = 0;
        for letter in chunk {
            bits = bits << 6 | six_bits(*letter)?;
        }
        bits <<= 6 * (4 - chunk.len());
        let [_, b0, b1, b2] = bits.to_be_bytes();
        bytes.extend_from_slice([b0, b1, b2].get(..chunk.len() - 1)?);
        // Bits behind the last whole byte must be zero, or two spellings would mean one word.
        if bits & (0xff_ffff >> (8 * (chunk.len() - 1))) != 0 {
            return None;
        }
    }
    let word = String::from_utf8(bytes).ok()?;
    debug_assert_eq!(encode_word(&word), text);
    Some(word)
}

fn six_bits(letter: u8) -> Option<u32> {
    Some(u32::from(match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'-' => 62,
        b'_' => 63,
        _ => return None,
    }))
}

/// Decodes a command and its arguments and checks them against every limit.
pub fn decode_words<'a>(encoded: impl Iterator<Item = &'a str>) -> Result<Words, DecodeError> {
    let mut words = Vec::new();
    for text in encoded {
        if words.len() > ARGS_MAX {
            return Err(DecodeError::PartLength { part: "number of arguments", len: words.len() });
        }
        words.push(decode_word(text).ok_or(DecodeError::Text { part: "word" })?);
    }
    Words::new(words)
}

/// The words joined by dots, as [`crate::limits::ARGV_VARIABLE`] carries them.
pub fn encode_joined(words: &Words) -> String {
    let encoded: Vec<String> = words.as_slice().iter().map(|word| encode_word(word)).collect();
    encoded.join(".")
}

/// The reverse of [`encode_joined`].
pub fn decode_joined(text: &str) -> Result<Words, DecodeError> {
    decode_words(text.split('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_spelled_as_the_standard_alphabet_says() {
        for (word, text) in [
            ("", "a"),
            ("f", "aZg"),
            ("fo", "aZm8"),
            ("foo", "aZm9v"),
            ("foob", "aZm9vYg"),
            ("é", "aw6k"),
            ("?>~", "aPz5-"),
            ("ÿÿÿ", "aw7_Dv8O_"),
        ] {
            assert_eq!(encode_word(word), text);
            assert_eq!(decode_word(text).as_deref(), Some(word));
        }
    }

    #[test]
    fn a_word_that_is_not_canonical_is_refused() {
        for text in
            ["", "b", "Zg", "aZ", "aZg==", "aZh", "aZm9", "aZg\n", "a Zg", "aZg.", "aPz5+", "aPz5/", "a_w", "aé"]
        {
            assert_eq!(decode_word(text), None, "'{text}'");
        }
    }

    /// Lengths used to be compared in whole groups of four letters, which let a word of two bytes more through to the
    /// check behind.
    #[test]
    fn a_word_is_as_long_as_any_word_may_be_and_not_a_byte_longer() {
        let longest = "x".repeat(ARG_BYTES_MAX);
        assert_eq!(decode_word(&encode_word(&longest)), Some(longest.clone()));
        assert_eq!(decode_word(&encode_word(&(longest.clone() + "x"))), None);
        assert_eq!(decode_word(&encode_word(&(longest + "xx"))), None);
    }

    #[test]
    fn a_joined_list_comes_back_as_it_was_and_has_between_1_and_129_words() {
        let words = Words::new(vec!["sh".into(), String::new(), "$HOME".into(), "\n".into()]).unwrap();
        assert_eq!(decode_joined(&encode_joined(&words)), Ok(words));
        for text in ["", "a", ".", "aZg.", ".aZg", "aZg..aZg"] {
            assert!(decode_joined(text).is_err(), "'{text}'");
        }
        assert!(decode_joined(&vec!["aZg"; 129].join(".")).is_ok());
        assert!(decode_joined(&vec!["aZg"; 130].join(".")).is_err());
    }
}
