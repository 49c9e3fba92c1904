//! Texts as users read them.

/// Asserts that `text` contains each of `words`.
#[track_caller]
pub fn assert_says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
}
