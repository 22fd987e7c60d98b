//! Samples, and what is said of them.

use serde::{Deserialize, Serialize};

/// What is said of a number of samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// How many there were.
    pub samples: usize,
    /// The middle one.
    pub median: f64,
    /// A tenth of them are below.
    pub p10: f64,
    /// A tenth of them are above.
    pub p90: f64,
}

impl Summary {
    /// `None` without samples, or if one of them is no number.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let at = |share| quantile(samples, share);
        Some(Self { samples: samples.len(), median: at(0.5)?, p10: at(0.1)?, p90: at(0.9)? })
    }

    /// One number, measured once.
    pub fn once(value: f64) -> Self {
        Self { samples: 1, median: value, p10: value, p90: value }
    }
}

/// The sample below which this share of them lies; between two of them in proportion.
pub fn quantile(samples: &[f64], share: f64) -> Option<f64> {
    if samples.iter().any(|sample| !sample.is_finite()) {
        return None;
    }
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    #[allow(clippy::cast_precision_loss)]
    let place = share.clamp(0.0, 1.0) * last as f64;
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let below = place as usize;
    let (low, high) = (*sorted.get(below)?, *sorted.get((below + 1).min(last))?);
    Some(low + (high - low) * place.fract())
}

/// A number as a person reads it: three digits that count, and no more.
pub fn readable(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 || value.fract() == 0.0 => grouped(value),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// A whole number, its thousands apart.
fn grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = if value <= -0.5 { "-".to_owned() } else { String::new() };
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_and_the_tenths_are_those_of_the_sorted_samples() {
        let samples: Vec<f64> = (0..=10).rev().map(f64::from).collect();
        let summary = Summary::of(&samples);
        assert_eq!(summary, Some(Summary { samples: 11, median: 5.0, p10: 1.0, p90: 9.0 }));
        assert_eq!(quantile(&[1.0, 2.0], 0.5), Some(1.5));
        assert_eq!(quantile(&[3.0], 0.99), Some(3.0));
    }

    #[test]
    fn nothing_is_said_of_no_samples_or_of_what_is_no_number() {
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[1.0, f64::NAN]), None);
        assert_eq!(Summary::of(&[f64::INFINITY]), None);
    }

    #[test]
    fn numbers_are_readable() {
        for (value, text) in [
            (0.0, "0"),
            (0.1234, "0.123"),
            (1.0, "1"),
            (1.234, "1.23"),
            (12.34, "12.3"),
            (999.6, "1,000"),
            (1_234_567.0, "1,234,567"),
            (-40.25, "-40.2"),
            (-1_234.0, "-1,234"),
        ] {
            assert_eq!(readable(value), text);
        }
    }
}
