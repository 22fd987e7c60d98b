//! Hardening.
