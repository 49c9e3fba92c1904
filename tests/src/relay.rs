//! A hop between two ends of a connection that remembers what the caller said.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

/// Forwards every connection to its own port to another one. Lives as long as the process.
#[derive(Clone, Debug)]
pub struct Relay {
    port: u16,
    heard: Arc<Mutex<Vec<u8>>>,
}

/// Bytes that are remembered of each connection.
const MEMORY: usize = 4096;

impl Relay {
    /// To `target` on this machine, as soon as somebody listens there; before that, connections are closed again.
    pub fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = Self {
            port: listener.local_addr().unwrap().port(),
            heard: Arc::default(),
        };
        let heard = relay.heard.clone();
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                if let Ok(far) = TcpStream::connect(("127.0.0.1", target)) {
                    forward(near, far, &heard);
                }
            }
        });
        relay
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The first bytes of the last connection, from its caller.
    pub fn heard(&self) -> Vec<u8> {
        self.heard.lock().unwrap().clone()
    }
}

fn forward(near: TcpStream, far: TcpStream, heard: &Arc<Mutex<Vec<u8>>>) {
    heard.lock().unwrap().clear();
    for (from, to, heard) in [(&near, &far, Some(heard.clone())), (&far, &near, None)] {
        to.set_nodelay(true).unwrap();
        let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
        thread::spawn(move || {
            let mut buffer = [0; 64 << 10];
            while let Ok(count @ 1..) = from.read(&mut buffer) {
                if let Some(heard) = &heard {
                    let mut heard = heard.lock().unwrap();
                    let room = MEMORY - heard.len();
                    heard.extend_from_slice(&buffer[..count.min(room)]);
                }
                if to.write_all(&buffer[..count]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Write);
        });
    }
}
