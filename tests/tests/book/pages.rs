//! The text of the pages.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

pub(super) fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Name and text of every page.
fn pages() -> Vec<(String, String)> {
    let mut pages: Vec<_> = fs::read_dir(root().join("book/src"))
        .unwrap()
        .map(|entry| format!("book/src/{}", entry.unwrap().file_name().to_str().unwrap()))
        .filter(|name| name.ends_with(".md"))
        .map(|name| (name.clone(), read(&name)))
        .collect();
    pages.sort();
    pages
}

/// A line in a page, above a fenced block that is a copy: `<!-- copy of FILE:REGION -->`, or of a whole file without `:REGION`.
fn origin(line: &str) -> Option<&str> {
    line.strip_prefix("<!-- copy of ")?.strip_suffix(" -->")
}

/// The marked copies of a page: where each is from, and its text.
fn copies(page: &str) -> Vec<(String, String)> {
    let mut copies = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let Some(origin) = origin(line) else { continue };
        let fence = lines.next().unwrap_or_default();
        assert!(
            fence.starts_with("```"),
            "no code below the mark of {origin}"
        );
        let code: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        copies.push((origin.to_owned(), code.join("\n")));
    }
    copies
}

/// What stands in `file` between the lines that name `region`, without its common indentation and other regions' marks.
fn region(file: &str, region: &str) -> Option<String> {
    let is = |line: &str, mark: &str| line.trim() == format!("// {mark}: {region}");
    let inside: Vec<&str> = file
        .lines()
        .skip_while(|line| !is(line, "ANCHOR"))
        .skip(1)
        .take_while(|line| !is(line, "ANCHOR_END"))
        .filter(|line| !line.trim().starts_with("// ANCHOR"))
        .collect();
    let indent = |line: &&str| line.len() - line.trim_start().len();
    let full = inside.iter().filter(|line| !line.trim().is_empty());
    let common = full.map(indent).min()?;
    let cut: Vec<&str> = inside
        .iter()
        .map(|line| line.get(common..).unwrap_or_default())
        .collect();
    Some(cut.join("\n"))
}

#[test]
fn a_region_is_read_without_its_indentation() {
    let file = "a\n    // ANCHOR: x\n    b\n\n        c\n    // ANCHOR: y\n    // ANCHOR_END: x\n d\n    // ANCHOR_END: y\n";
    assert_eq!(region(file, "x").unwrap(), "b\n\n    c");
    assert_eq!(region(file, "y").unwrap(), "d");
    assert_eq!(region(file, "z"), None);
    let page = "<!-- copy of f:x -->\n```rust\nb\n```\n\n```\nno copy\n```\n<!-- copy of g -->\n```bash\ne\nf\n```\n";
    let expected = [("f:x", "b"), ("g", "e\nf")].map(|(a, b)| (a.to_owned(), b.to_owned()));
    assert_eq!(copies(page), expected);
}

#[test]
fn the_code_in_the_pages_is_the_code_that_runs() {
    let mut used = BTreeSet::new();
    for (name, page) in pages() {
        assert!(
            !page.contains("{{#"),
            "{name} cannot be read without mdBook: copy the code and mark it"
        );
        for (origin, copy) in copies(&page) {
            let original = match origin.split_once(':') {
                Some((file, name)) => region(&read(file), name),
                None => Some(read(&origin).trim_end().to_owned()),
            };
            let original = original.unwrap_or_else(|| panic!("{name}: there is no {origin}"));
            assert_eq!(copy, original, "{name} differs from {origin}");
            used.insert(origin);
        }
    }
    for file in [
        "examples/examples/char_lm_ddp/main.rs",
        "examples/examples/char_lm_ddp/training.rs",
        "examples/examples/learner_ddp.rs",
        "examples/examples/resnet_ddp.rs",
        "tests/tests/book/checkpoints.rs",
        "tests/tests/book/code.rs",
        "tests/tests/book/learner.rs",
        "tests/tests/book/names.rs",
        "tests/tests/book/optimizers.rs",
        "tests/tests/book/steps.rs",
    ] {
        for line in read(file).lines() {
            if let Some(region) = line.trim().strip_prefix("// ANCHOR: ") {
                let origin = format!("{file}:{region}");
                assert!(used.contains(&origin), "no page shows {origin}");
            }
        }
    }
}

#[test]
fn every_page_is_in_the_table_of_contents_and_every_link_leads_somewhere() {
    let contents = read("book/src/SUMMARY.md");
    let mut pages = pages();
    for (name, _) in &pages {
        let file = name.rsplit('/').next().unwrap();
        assert!(
            file == "SUMMARY.md" || contents.contains(&format!("({file})")),
            "{file} is not in SUMMARY.md"
        );
    }
    pages.push(("README.md".into(), read("README.md")));
    for (name, page) in pages {
        let folder = root().join(&name).parent().unwrap().to_owned();
        for link in page.split("](").skip(1) {
            let link = link.split([')', '#']).next().unwrap();
            assert!(
                link.is_empty() || link.contains("://") || folder.join(link).exists(),
                "{name}: {link} leads nowhere"
            );
        }
    }
}

/// The variables that the sources name as a constant: `= "NAME"` in a file of the library.
fn variables() -> BTreeSet<String> {
    fn walk(folder: &Path, names: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, names);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap_or_default();
            for (at, _) in text.match_indices("\"BURN_DDP_") {
                let name = &text[at + 1..];
                let end = name.find(|c: char| !c.is_ascii_uppercase() && c != '_');
                let name = &name[..end.unwrap()];
                if !name.contains("_TEST_") {
                    names.insert(name.to_owned());
                }
            }
        }
    }
    let mut names = BTreeSet::new();
    walk(&root().join("burn-ddp/src"), &mut names);
    names
}

#[test]
fn the_table_of_variables_is_complete() {
    let page = read("book/src/variables.md");
    let listed: BTreeSet<String> = page
        .split('`')
        .filter(|word| word.starts_with("BURN_DDP_"))
        .map(|word| word.split('=').next().unwrap().to_owned())
        .collect();
    assert_eq!(listed, variables());
}

/// Every option of `burn-ddp run`, up to the program, in the pages and in the scripts that they show.
#[test]
fn the_command_has_the_options_that_are_shown() {
    let source = read("burn-ddp/src/launch/cli/args.rs");
    let mut texts = pages();
    texts.push(("README.md".into(), read("README.md")));
    let mut seen = BTreeSet::new();
    for (name, text) in texts {
        let text = text.replace("\\\n", " ");
        for command in text.split("burn-ddp run ").skip(1) {
            let line = command.split(['\n', '`']).next().unwrap();
            let mut words = line.split(' ').filter(|word| !word.is_empty());
            while let Some(option) = words.next().and_then(|word| word.strip_prefix("--")) {
                let field = format!("    {}: ", option.replace('-', "_"));
                let known = option == "help" || source.contains(&field);
                assert!(known, "{name}: burn-ddp run has no --{option}");
                seen.insert(option.to_owned());
                words.next(); // its value
            }
        }
    }
    assert!(seen.len() > 3, "{seen:?}");
}
