//! Several ranges of one memory, as if they lay end to end.

use std::ops::Range;

/// Ranges of bytes, in order. Empty ones are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Spans(Vec<Range<usize>>);

impl Spans {
    pub(super) fn len(&self) -> usize {
        self.0.iter().map(ExactSizeIterator::len).sum()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Range<usize>> {
        self.0.iter()
    }

    /// The ranges that the bytes `window` of the whole fall into, each with its distance from the start of the window.
    pub(super) fn within(
        &self,
        window: Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>)> {
        let mut before = 0;
        self.0.iter().filter_map(move |range| {
            let at = before;
            before += range.len();
            let from = window.start.max(at);
            let to = window.end.min(before);
            (from < to).then(|| {
                let shift = |x: usize| range.start + (x - at);
                (from - window.start, shift(from)..shift(to))
            })
        })
    }
}

impl FromIterator<Range<usize>> for Spans {
    fn from_iter<I: IntoIterator<Item = Range<usize>>>(ranges: I) -> Self {
        Self(
            ranges
                .into_iter()
                .filter(|range| !range.is_empty())
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_maps_to_the_ranges_under_it() {
        let spans: Spans = [10..14, 5..5, 20..23, 0..2].into_iter().collect();
        assert_eq!(spans.len(), 9);
        let within = |window| spans.within(window).collect::<Vec<_>>();
        assert_eq!(within(0..9), [(0, 10..14), (4, 20..23), (7, 0..2)]);
        assert_eq!(within(3..5), [(0, 13..14), (1, 20..21)]);
        assert_eq!(within(4..7), [(0, 20..23)]);
        assert_eq!(within(8..8), []);
    }
}
