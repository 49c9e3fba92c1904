//! The troubleshooting page and the error texts of the library.

use super::pages::{read, root};
use std::{fs, path::Path};

const PAGE: &str = "book/src/troubleshooting.md";

/// A string in a source file, `…` for each placeholder, and whether it is an error's text (`#[error("...")]`).
struct Text {
    text: String,
    is_error: bool,
}

/// The strings of a Rust source. Raw strings are read as plain ones, which is near enough for texts.
fn strings(source: &str) -> Vec<Text> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(next) = source[at..].find(['"', '/']) {
        let start = at + next;
        let rest = &source[start..];
        if rest.starts_with("//") {
            at = start + rest.find('\n').unwrap_or(rest.len());
        } else if rest.starts_with('/') || source[..start].ends_with('\'') {
            at = start + 1;
        } else {
            let (text, length) = string(&rest[1..]);
            at = start + 1 + length;
            let is_error = source[..start].trim_end().ends_with("#[error(");
            found.push(Text { text, is_error });
        }
    }
    found
}

/// The string that begins here, and its length in the source with the closing quote.
fn string(source: &str) -> (String, usize) {
    let mut text = String::new();
    let mut chars = source.char_indices().peekable();
    let mut depth = 0;
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return (text, at + 1),
            '\\' => {
                let escaped = chars.next().map(|(_, char)| char);
                if escaped == Some('\n') {
                    while chars.next_if(|(_, char)| char.is_whitespace()).is_some() {}
                } else if depth == 0 {
                    text.extend(escaped);
                }
            }
            '{' => {
                depth += 1;
                if depth == 1 {
                    text.push('…');
                }
            }
            '}' => depth -= 1,
            _ if depth == 0 => text.push(char),
            _ => {}
        }
    }
    panic!("a string without an end: {text}")
}

fn library() -> Vec<Text> {
    fn walk(folder: &Path, found: &mut Vec<Text>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if !path.to_str().unwrap().ends_with("tests.rs") {
                found.extend(strings(&fs::read_to_string(&path).unwrap()));
            }
        }
    }
    let mut found = Vec::new();
    walk(&root().join("burn-ddp/src"), &mut found);
    found
}

/// What stands in code type in the page's headings.
fn symptoms(page: &str) -> Vec<&str> {
    let headings = page.lines().filter(|line| line.starts_with("### "));
    headings
        .flat_map(|line| line.split("``").skip(1).step_by(2).map(str::trim))
        .collect()
}

#[test]
fn strings_are_found_in_source() {
    let source = r#"
        // no "string" here
        #[error("rank {rank}: `{path}` is \
                 {}.")]
        Gone, let quote = '"'; a / b; "x\"y {a:?}{b}"
    "#;
    let found: Vec<_> = strings(source)
        .into_iter()
        .map(|text| (text.text, text.is_error))
        .collect();
    let expected = [("rank …: `…` is ….", true), ("x\"y ……", false)];
    assert_eq!(found, expected.map(|(text, is)| (text.to_owned(), is)));
    assert_eq!(
        symptoms("### ``a `b` …``, ``c``\n\ntext ``d``\n### e\n"),
        ["a `b` …", "c"]
    );
}

/// A text without letters only passes on another error.
#[test]
fn every_error_text_is_on_the_page_and_nothing_else() {
    let (page, library) = (read(PAGE), library());
    let symptoms = symptoms(&page);
    for symptom in &symptoms {
        assert!(
            library.iter().any(|text| text.text.contains(symptom)),
            "{PAGE}: nothing in the library says {symptom:?}"
        );
    }
    let errors = library
        .iter()
        .filter(|text| text.is_error && text.text.contains(char::is_alphabetic));
    let missing: Vec<_> = errors
        .filter(|text| !symptoms.iter().any(|symptom| text.text.contains(symptom)))
        .map(|text| &text.text)
        .collect();
    assert!(missing.is_empty(), "not in {PAGE}: {missing:#?}");
    // What is printed at the end points there.
    assert!(library.iter().any(|text| text.text.contains(PAGE)));
}
