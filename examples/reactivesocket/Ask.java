// Asks a handler of an Aqueduct service over ReactiveSocket, and prints its rows, one a line.
// It needs a JDK (17 or later) and nothing else:
//
//   java Ask.java HOST PORT HANDLER ROWS      one answer to ROWS: '[{"id": 1, "word": "one"}]'
//   java Ask.java HOST PORT HANDLER           the rows of a source, as a stream
//
// docs/cookbook/other-languages.md says what the bytes mean.

import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.EOFException;
import java.io.IOException;
import java.io.OutputStream;
import java.io.PrintStream;
import java.net.ConnectException;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.net.SocketTimeoutException;
import java.net.UnknownHostException;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

import static java.nio.charset.StandardCharsets.UTF_8;

public class Ask {
    static final String USAGE = """
        usage: java Ask.java [OPTION ...] HOST PORT HANDLER [ROWS]

        Without ROWS the handler is a source, and its rows are a stream. With ROWS, a JSON array
        of objects, it is a function of one batch; "-" reads ROWS from the standard input.

          --stream          with ROWS: the handler is a generator, whose answers are a stream
          --ask ITEMS       how many items of a stream are asked for at once (16)
          --most ROWS       cancel the stream after so many rows
          --deadline SECONDS  how long the whole call may take (none)
          --wait SECONDS    how long to wait for the next bytes (30)
          --token TEXT      what the service asks of its callers
        """;

    public static void main(String[] words) {
        System.setOut(new PrintStream(System.out, false, UTF_8)); // a row does not flush; see print
        System.setErr(new PrintStream(System.err, true, UTF_8));
        try {
            run(Options.of(words));
        } catch (Usage wrong) {
            stop(2, wrong.getMessage() + "\n\n" + USAGE);
        } catch (Failed failed) {
            stop(1, failed.getMessage());
        } catch (ConnectException | UnknownHostException refused) {
            stop(1, "no service there: " + refused.getMessage());
        } catch (SocketTimeoutException late) {
            stop(1, "the service is silent (" + late.getMessage() + "); --wait is the limit");
        } catch (EOFException gone) {
            stop(1, "the service closed the connection before the end of its answer");
        } catch (IOException broken) {
            stop(1, "the connection broke: " + broken.getMessage());
        }
    }

    static void run(Options options) throws IOException, Failed {
        try (Connection connection = new Connection(options)) {
            if (options.rows != null && !options.stream) {
                print(connection.request(options.header(), options.rows), Long.MAX_VALUE);
                return;
            }
            byte[] body = options.rows == null ? new byte[0] : options.rows;
            connection.openStream(options.header(), body, options.ask);
            long left = options.most;
            byte[] item;
            while ((item = connection.next()) != null) {
                left -= print(item, left);
                if (left <= 0) {
                    connection.cancel();
                    return;
                }
            }
        }
    }

    /** Prints the rows of an item, at most so many; returns how many. */
    static int print(byte[] item, long most) throws Failed {
        int printed = 0;
        for (String row : rows(new String(item, UTF_8))) {
            if (printed == most) {
                break;
            }
            System.out.println(row);
            printed++;
        }
        System.out.flush();
        return printed;
    }

    static void stop(int code, String why) {
        System.out.flush();
        System.err.println(why.stripTrailing());
        System.exit(code);
    }

    /** The elements of a JSON array, each as the text that it is. */
    static List<String> rows(String json) throws Failed {
        String text = json.strip();
        if (!text.startsWith("[") || !text.endsWith("]")) {
            throw new Failed("the item is no JSON array: " + shown(text));
        }
        List<String> found = new ArrayList<>();
        int depth = 0;
        int begin = 1;
        boolean quoted = false;
        for (int at = 1; at < text.length(); at++) {
            char next = text.charAt(at);
            if (quoted) {
                if (next == '\\') {
                    at++; // the character behind it may be a quote
                } else if (next == '"') {
                    quoted = false;
                }
            } else if (next == '"') {
                quoted = true;
            } else if (next == '{' || next == '[') {
                depth++;
            } else if (depth == 0 && (next == ',' || next == ']')) {
                String row = text.substring(begin, at).strip();
                if (!row.isEmpty()) { // of an empty array
                    found.add(row);
                }
                begin = at + 1;
            } else if (next == '}' || next == ']') {
                depth--;
            }
        }
        if (depth != 0 || quoted || begin != text.length()) {
            throw new Failed("the item is no JSON array: " + shown(text));
        }
        return found;
    }

    static String shown(String text) {
        return text.length() > 200 ? text.substring(0, 200) + "..." : text;
    }

    /** What the service, or its bytes, did not make possible. */
    static class Failed extends Exception {
        Failed(String why) {
            super(why);
        }
    }

    /** A command line that cannot be. */
    static class Usage extends RuntimeException {
        Usage(String why) {
            super(why);
        }
    }

    /** One frame of ReactiveSocket. */
    record Frame(int type, int flags, long stream, byte[] data) {}

    /** A connection with one request: it sends the request, and reads the items of its answer. */
    static class Connection implements AutoCloseable {
        static final int SETUP = 0x0001;
        static final int REQUEST_RESPONSE = 0x0011;
        static final int REQUEST_STREAM = 0x0013;
        static final int REQUEST_N = 0x0015;
        static final int CANCEL = 0x0016;
        static final int RESPONSE = 0x0020;
        static final int ERROR = 0x0021;
        static final int BEGIN = 0x40;
        static final int END = 0x20;
        static final int COMPLETE = 0x10;

        static final int HEADER = 12; // version, flags, type, stream
        static final int MOST = 64 << 20; // bytes of a frame, and of an item
        static final long STREAM = 1; // clients use odd numbers

        private final Socket socket = new Socket();
        private final DataInputStream in;
        private final OutputStream out;
        private long asked; // items at once
        private long credit; // items that were asked for and have not come
        private boolean ended;

        Connection(Options options) throws IOException {
            try {
                socket.connect(new InetSocketAddress(options.host, options.port), options.wait);
                socket.setTcpNoDelay(true);
                socket.setSoTimeout(options.wait);
                in = new DataInputStream(socket.getInputStream());
                out = socket.getOutputStream();
                // The first frame; the service answers it only if it does not like it.
                send(SETUP, 0, pairs(Map.of("format", "json")));
            } catch (IOException failed) {
                socket.close();
                throw failed;
            }
        }

        /** Asks a function of one batch; returns its answer. */
        byte[] request(Map<String, String> header, byte[] rows) throws IOException, Failed {
            asked = credit = 1; // a request asks for one item, without saying so
            send(REQUEST_RESPONSE, STREAM, pairs(header), rows);
            byte[] item = next();
            if (item == null) {
                throw new Failed("the service ended the call without an answer");
            }
            return item;
        }

        /** Asks for a stream of items; {@code ask} of them may be on their way at once. */
        void openStream(Map<String, String> header, byte[] rows, long ask) throws IOException {
            asked = credit = ask;
            send(REQUEST_STREAM, STREAM, number(ask), pairs(header), rows);
        }

        /** The next item; null at the end. */
        byte[] next() throws IOException, Failed {
            if (!ended && credit <= asked / 2) {
                send(REQUEST_N, STREAM, number(asked - credit));
                credit = asked;
            }
            ByteArrayOutputStream item = new ByteArrayOutputStream();
            boolean open = false; // a large item comes in fragments
            while (!ended) {
                Frame frame = receive();
                if (frame.type == ERROR) {
                    ended = true;
                    throw new Failed("the service says: " + new String(frame.data, UTF_8));
                }
                if (frame.type != RESPONSE || frame.stream != STREAM) {
                    continue; // not for this request
                }
                open = open || (frame.flags & BEGIN) != 0;
                boolean whole = !open || (frame.flags & END) != 0;
                if (item.size() + frame.data.length > MOST) {
                    throw new Failed("an item has more than " + MOST + " bytes");
                }
                item.writeBytes(frame.data);
                ended = whole && (frame.flags & COMPLETE) != 0;
                boolean none = frame.flags == COMPLETE && frame.data.length == 0; // the end alone
                if (whole && !none) {
                    credit--;
                    return item.toByteArray();
                }
            }
            return null;
        }

        /** Wants no more items. */
        void cancel() throws IOException {
            if (!ended) {
                send(CANCEL, STREAM);
                ended = true;
            }
        }

        @Override
        public void close() throws IOException {
            socket.close();
        }

        private void send(int type, long stream, byte[]... parts) throws IOException {
            int size = 4 + HEADER; // the length counts its own four bytes
            for (byte[] part : parts) {
                size += part.length;
            }
            ByteBuffer frame = ByteBuffer.allocate(size).putInt(size);
            frame.put((byte) 0).put((byte) 0).putShort((short) type).putLong(stream);
            for (byte[] part : parts) {
                frame.put(part);
            }
            out.write(frame.array());
        }

        private Frame receive() throws IOException, Failed {
            int size = in.readInt() & 0x7FFFFFFF;
            if (size < HEADER + 4 || size > MOST) {
                throw new Failed("a frame of " + size + " bytes: no ReactiveSocket on this port?");
            }
            int version = in.readUnsignedByte();
            int flags = in.readUnsignedByte();
            int type = in.readUnsignedShort();
            long stream = in.readLong();
            if (version != 0) {
                throw new Failed("version " + version + " of ReactiveSocket; this program has 0");
            }
            byte[] data = new byte[size - HEADER - 4];
            in.readFully(data);
            return new Frame(type, flags & (BEGIN | END | COMPLETE), stream, data);
        }

        private static byte[] number(long value) {
            return ByteBuffer.allocate(8).putLong(value).array();
        }

        /** Header pairs: the size of all, then each key and each value with its size before it. */
        private static byte[] pairs(Map<String, String> header) {
            ByteArrayOutputStream all = new ByteArrayOutputStream();
            header.forEach((key, value) -> {
                for (String word : List.of(key, value)) {
                    byte[] bytes = word.getBytes(UTF_8);
                    varint(all, bytes.length);
                    all.writeBytes(bytes);
                }
            });
            ByteArrayOutputStream framed = new ByteArrayOutputStream();
            varint(framed, all.size());
            framed.writeBytes(all.toByteArray());
            return framed.toByteArray();
        }

        /** Seven bits a byte, the lowest first; the top bit says that more follow. */
        private static void varint(ByteArrayOutputStream to, int value) {
            while (value > 0x7F) {
                to.write(value & 0x7F | 0x80);
                value >>>= 7;
            }
            to.write(value);
        }
    }

    /** The command line. */
    static class Options {
        String host;
        int port;
        String handler;
        byte[] rows;
        boolean stream;
        long ask = 16;
        long most = Long.MAX_VALUE;
        int wait = 30_000;
        String deadline;
        String token;

        static Options of(String[] words) {
            Options options = new Options();
            List<String> places = new ArrayList<>();
            for (int at = 0; at < words.length; at++) {
                String word = words[at];
                if (!word.startsWith("--")) {
                    places.add(word);
                } else if (word.equals("--stream")) {
                    options.stream = true;
                } else if (at + 1 == words.length) {
                    throw new Usage(word + " is unknown, or lacks its value");
                } else {
                    options.set(word, words[++at]);
                }
            }
            if (places.size() < 3 || places.size() > 4) {
                throw new Usage("say HOST, PORT, HANDLER, and ROWS for a function of one batch");
            }
            options.host = places.get(0);
            options.port = (int) whole("PORT", places.get(1), 1, 65535);
            options.handler = places.get(2);
            if (places.size() == 4) {
                options.rows = rowsOf(places.get(3));
            }
            return options;
        }

        /** What the service is told of the call, before the rows. */
        Map<String, String> header() {
            Map<String, String> header = new LinkedHashMap<>();
            header.put("handler", handler);
            if (deadline != null) {
                header.put("deadline", deadline);
            }
            if (token != null) {
                header.put("token", token);
            }
            return header;
        }

        private void set(String name, String value) {
            switch (name) {
                case "--ask" -> ask = whole(name, value, 1, Long.MAX_VALUE);
                case "--most" -> most = whole(name, value, 1, Long.MAX_VALUE);
                case "--wait" -> wait = 1000 * (int) whole(name, value, 1, 1_000_000);
                case "--deadline" ->
                    deadline = Long.toString(1000 * whole(name, value, 1, 1_000_000));
                case "--token" -> token = value;
                default -> throw new Usage("unknown option " + name);
            }
        }

        private static byte[] rowsOf(String text) {
            if (!text.equals("-")) {
                return text.getBytes(UTF_8);
            }
            try {
                return System.in.readAllBytes();
            } catch (IOException failed) {
                throw new Usage("the standard input cannot be read: " + failed.getMessage());
            }
        }

        private static long whole(String name, String text, long least, long most) {
            try {
                long value = Long.parseLong(text);
                if (value >= least && value <= most) {
                    return value;
                }
            } catch (NumberFormatException none) {
                // said below
            }
            throw new Usage(name + " is " + text + "; say a number from " + least + " to " + most);
        }
    }
}
