//! A step as a picture.

use burn_ddp::RoundTrace;
use std::{fmt::Write, time::Duration};

const WIDTH: f64 = 900.0;
const LEFT: f64 = 150.0;
const ROW: f64 = 22.0;
const TOP: f64 = 40.0;

/// An SVG of one synchronised backward pass on one rank: when each gradient was complete (upper part), when each bucket
/// was launched and reduced (lower part), and where backward ended.
pub fn svg(trace: &RoundTrace, title: &str) -> String {
    let span = trace.end.as_secs_f64().max(f64::MIN_POSITIVE);
    let x = |t: Duration| LEFT + t.as_secs_f64() / span * (WIDTH - LEFT - 20.0);
    let rows = trace.buckets.len() + 1;
    let height = TOP + ROW * rows as f64 + 40.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n\
         <text x=\"10\" y=\"18\" font-size=\"13\">{title}</text>\n"
    );
    // Writing to a string cannot fail.
    let mut line = |text: String| {
        let _ = writeln!(out, "{text}");
    };
    let y = |row: usize| TOP + ROW * row as f64;
    line(format!(
        "<text x=\"10\" y=\"{}\">gradients complete</text>",
        y(0) + 12.0
    ));
    for (path, at) in &trace.ready {
        let (x, y) = (x(*at), y(0));
        line(format!(
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{y}\" y2=\"{}\" stroke=\"#1b6ca8\"><title>{path}</title></line>",
            y + 16.0
        ));
    }
    for (index, bucket) in trace.buckets.iter().enumerate() {
        let y = y(index + 1);
        let (launched, started, finished) =
            (x(bucket.launched), x(bucket.started), x(bucket.finished));
        line(format!(
            "<text x=\"10\" y=\"{}\">bucket {index}: {:.2} MiB</text>",
            y + 12.0,
            bucket.bytes as f64 / 1048576.0
        ));
        line(format!(
            "<line x1=\"{launched:.1}\" x2=\"{started:.1}\" y1=\"{0}\" y2=\"{0}\" stroke=\"#999\" stroke-dasharray=\"2 2\"/>",
            y + 8.0
        ));
        line(format!(
            "<rect x=\"{started:.1}\" y=\"{}\" width=\"{:.1}\" height=\"12\" fill=\"#e08a1e\"><title>{}</title></rect>",
            y + 2.0,
            (finished - started).max(1.0),
            bucket.parameters.join(", ")
        ));
    }
    let end = x(trace.backward_end);
    line(format!(
        "<line x1=\"{end:.1}\" x2=\"{end:.1}\" y1=\"{}\" y2=\"{}\" stroke=\"#b00\"/>\n<text x=\"{:.1}\" y=\"{}\" fill=\"#b00\" text-anchor=\"end\">backward ends: {:.1} ms</text>",
        TOP - 8.0,
        height - 30.0,
        end - 4.0,
        height - 34.0,
        trace.backward_end.as_secs_f64() * 1e3
    ));
    line(format!(
        "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">all gradients averaged: {:.1} ms after the first</text>\n</svg>",
        WIDTH - 10.0,
        height - 12.0,
        trace.end.as_secs_f64() * 1e3
    ));
    out
}
