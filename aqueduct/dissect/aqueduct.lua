-- A dissector of Wireshark and tshark for bpmux/rel, and for the Aqueduct channels on it.
--
-- It reads what goes over TCP, and what TLS hands on when the keys of the session are known. The
-- page docs/guides/wireshark.md says how to use it, and what it does not see.
--
-- Packets are read in their order once, and then in any order. So what a chunk needs to know of the
-- chunks before it is kept beside it ("views"). A reader of bytes never adds to the tree: a frame is
-- read as a whole, or not at all, and is shown after that.
--
-- Numbers of 64 bits are UInt64 throughout: numbers of Lua 5.2 are exact up to 2^53 alone.

local bpmux = Proto("bpmux", "bpmux/rel")
local aqueduct = Proto("aqueduct", "Aqueduct channels")

local CHUNK_LIMIT = 64 * 1024 * 1024 -- bytes; a larger chunk is taken for a lie
local HEAD_LIMIT = 2 * 1024 * 1024 -- bytes of a frame, its payload aside
local MAGIC = "\239\80\95\166\96\15\64\142AQUEDUCT"
local VERSION = "0.0.0-AFTER"
local ZERO, ONE = UInt64(0), UInt64(1)
local SIDES = { [false] = "client", [true] = "server" }

local TYPES = {
  [0] = "Out-Request", "In-Request", "Out-Sink", "In-Sink", "Out-Stream", "In-Stream", "Duplex",
  "Partial",
}
local OUT_REQUEST, IN_REQUEST, OUT_SINK, IN_SINK = 0, 1, 2, 3
local IN_STREAM, DUPLEX, PARTIAL = 5, 6, 7
local PAYLOAD, CREDIT, PING, END, ACK_END = 16, 8, 4, 2, 1

local b = {
  type = ProtoField.uint8("bpmux.type", "Type", base.DEC, TYPES, 0xe0),
  flags_payload = ProtoField.bool("bpmux.flags.payload", "Payload", 8, nil, PAYLOAD),
  flags_credit = ProtoField.bool("bpmux.flags.credit", "Credit", 8, nil, CREDIT),
  flags_ping = ProtoField.bool("bpmux.flags.ping", "Ping", 8, nil, PING),
  flags_end = ProtoField.bool("bpmux.flags.end", "End", 8, nil, END),
  flags_ack_end = ProtoField.bool("bpmux.flags.ack_end", "Acknowledged end", 8, nil, ACK_END),
  request = ProtoField.uint64("bpmux.request", "Request"),
  stream = ProtoField.uint64("bpmux.stream", "Stream"),
  total = ProtoField.uint64("bpmux.total", "Total size of a partial payload"),
  payload_length = ProtoField.uint64("bpmux.payload_length", "Length of the payload"),
  payload = ProtoField.bytes("bpmux.payload", "Payload"),
  credit = ProtoField.uint64("bpmux.credit", "Credit"),
  end_length = ProtoField.uint64("bpmux.end_length", "Length of the end payload"),
  end_payload = ProtoField.bytes("bpmux.end_payload", "End payload"),
  undissected = ProtoField.bytes("bpmux.undissected", "Not dissected"),
}
local bpmux_malformed =
  ProtoExpert.new("bpmux.malformed", "Not a chunk", expert.group.MALFORMED, expert.severity.ERROR)
local bpmux_lost = ProtoExpert.new(
  "bpmux.lost", "Where chunks begin is not known", expert.group.UNDECODED, expert.severity.WARN
)

local a = {
  from = ProtoField.string("aqueduct.from", "From"),
  datagram = ProtoField.bool("aqueduct.datagram", "Datagram"),
  dialect = ProtoField.string("aqueduct.dialect", "Dialect"),
  streams = ProtoField.uint64("aqueduct.streams", "Streams allowed"),
  bidi_streams = ProtoField.uint64("aqueduct.bidi_streams", "Bidirectional streams allowed"),
  reset = ProtoField.uint64("aqueduct.reset", "Stream reset with code"),
  stop = ProtoField.uint64("aqueduct.stop", "Stream stopped with code"),
  close_code = ProtoField.uint64("aqueduct.close.code", "Close code"),
  close_reason = ProtoField.string("aqueduct.close.reason", "Close reason"),
  frame = ProtoField.none("aqueduct.frame", "Frame"),
  type = ProtoField.string("aqueduct.frame.type", "Type"),
  tag = ProtoField.uint8("aqueduct.frame.tag", "Tag"),
  version = ProtoField.string("aqueduct.version", "Version"),
  channel = ProtoField.uint64("aqueduct.channel", "Channel"),
  attachment = ProtoField.uint64("aqueduct.attachment", "Attached channel"),
  creator = ProtoField.string("aqueduct.channel.creator", "Creator"),
  sender = ProtoField.string("aqueduct.channel.sender", "Sender"),
  oneshot = ProtoField.bool("aqueduct.channel.oneshot", "Oneshot"),
  index = ProtoField.uint64("aqueduct.channel.index", "Index"),
  num = ProtoField.uint64("aqueduct.message.num", "Number"),
  header = ProtoField.none("aqueduct.header", "Header"),
  key = ProtoField.string("aqueduct.header.key", "Key"),
  value = ProtoField.bytes("aqueduct.header.value", "Value"),
  payload_length = ProtoField.uint64("aqueduct.payload_length", "Length of the payload"),
  payload = ProtoField.bytes("aqueduct.payload", "Payload"),
  count = ProtoField.uint64("aqueduct.count", "Unreliable messages"),
  sent_reliable = ProtoField.uint64("aqueduct.sent_reliable", "Reliable messages in all"),
  range = ProtoField.uint64("aqueduct.range", "Range"),
  waiting = ProtoField.bytes("aqueduct.waiting", "Begin of a frame"),
  undissected = ProtoField.bytes("aqueduct.undissected", "Not dissected"),
}
local aqueduct_malformed = ProtoExpert.new(
  "aqueduct.malformed", "Not a frame sequence", expert.group.MALFORMED, expert.severity.ERROR
)

local function values(of)
  local found = {}
  for _, field in pairs(of) do
    found[#found + 1] = field
  end
  return found
end

bpmux.fields = values(b)
bpmux.experts = { bpmux_malformed, bpmux_lost }
aqueduct.fields = values(a)
aqueduct.experts = { aqueduct_malformed }

local tcp_stream = Field.new("tcp.stream")

-- ------------------------------------------------------------------ readers of bytes

local MORE = {} -- raised where only bytes are missing

local function fail(text)
  error({ text = text }, 0)
end

-- A reader of text[at + 1 .. stop]. One of a block is closed: no more bytes can come.
local function reader_of(text, at, stop, closed)
  return { text = text, at = at, stop = stop, closed = closed }
end

local function take(reader, size)
  if size > reader.stop - reader.at then
    if reader.closed then
      fail("a length or number goes beyond its block")
    end
    error(MORE, 0)
  end
  local start = reader.at
  reader.at = start + size
  return reader.text:sub(start + 1, start + size)
end

local function byte(reader)
  return take(reader, 1):byte()
end

-- BP-R1: the shortest form alone.
local function varu64(reader)
  local first = byte(reader)
  if first < 248 then
    return UInt64(first)
  end
  local size, low, high = first - 247, 0, 0
  local bytes = take(reader, size)
  for k = 1, size do
    high = (high * 256 + math.floor(low / 0x1000000)) % 0x100000000
    low = (low * 256 + bytes:byte(k)) % 0x100000000
  end
  if bytes:byte(1) < (size == 1 and 248 or 1) then
    fail("a VarU64 is not in its shortest form (BP-R1)")
  end
  return UInt64(low, high)
end

-- AQ-2 and AQ-R1: seven bits a byte, the lowest first.
local function varint(reader)
  local low, high = 0, 0
  for k = 0, 9 do
    local read = byte(reader)
    local bits = read % 128
    if k < 4 then
      low = low + bits * 2 ^ (7 * k)
    elseif k == 4 then
      low = low + (bits % 16) * 2 ^ 28
      high = math.floor(bits / 16)
    else
      high = high + bits * 2 ^ (7 * k - 32)
    end
    if k == 9 and read > 1 then
      fail("a varint has more than 64 bits (AQ-R1)")
    end
    if read < 128 then
      if read == 0 and k > 0 then
        fail("a varint is not in its shortest form (AQ-R1)")
      end
      return UInt64(math.floor(low), math.floor(high))
    end
  end
end

local function length(reader)
  local size = varint(reader):tonumber()
  if size > HEAD_LIMIT and not reader.closed then
    fail(string.format("a block of %.0f bytes is too long for a dissector", size))
  end
  return size
end

local function block(reader)
  local size = length(reader)
  local start = reader.at
  take(reader, size)
  return reader_of(reader.text, start, start + size, true)
end

-- ------------------------------------------------------------------- frames, as items

-- An item is what the tree gets: a field, where its bytes are, maybe a value, and items in it.
local function item(field, at, size, value, inner)
  return { field = field, at = at, size = size, value = value, inner = inner }
end

local function bit(number, place)
  return number:rshift(place):band(1) == ONE
end

-- Dialects differ in which bit of an id is which: AQ-6 and AQ0-7.
local function creator_of(channel, dialect)
  return bit(channel, dialect == "control-streams" and 1 or 0)
end

local function sender_of(channel, dialect)
  return bit(channel, dialect == "control-streams" and 0 or 1)
end

local function channel_text(channel, dialect)
  if channel == ZERO then
    return "0 (the entrypoint)"
  end
  local sender = sender_of(channel, dialect)
  return string.format(
    "%s (%s to %s, %s, index %s of the %s)",
    tostring(channel), SIDES[sender], SIDES[not sender],
    bit(channel, 2) and "oneshot" or "multishot",
    tostring(channel:rshift(3)), SIDES[creator_of(channel, dialect)]
  )
end

local function channel_item(field, channel, at, size, dialect)
  return item(field, at, size, channel, {
    item(a.creator, at, size, SIDES[creator_of(channel, dialect)]),
    item(a.sender, at, size, SIDES[sender_of(channel, dialect)]),
    item(a.oneshot, at, size, bit(channel, 2)),
    item(a.index, at, size, channel:rshift(3)),
  })
end

local function number_item(reader, field)
  local at = reader.at
  local number = varint(reader)
  return item(field, at, reader.at - at, number), number
end

-- AQ-5, AQ-R3.
local function header_items(inner)
  local found = {}
  while inner.at < inner.stop do
    local start = inner.at
    local size = length(inner)
    local key_at = inner.at
    local key = take(inner, size)
    if inner.at == inner.stop then
      fail("header data has a key without a value (AQ-5)")
    end
    if key == "" or key:find("[\128-\255]") then
      fail("a header's key is empty or not ASCII (AQ-R3)")
    end
    size = length(inner)
    local value_at = inner.at
    take(inner, size)
    local parts = { item(a.key, key_at, #key, key) }
    if size > 0 then
      parts[2] = item(a.value, value_at, size)
    end
    found[#found + 1] = item(a.header, start, inner.at - start, nil, parts)
    found[#found].text = "Header " .. key
  end
  return found
end

local function append(items, more)
  for _, each in ipairs(more) do
    items[#items + 1] = each
  end
  return items
end

-- Lengths of ranges: only the first may be zero, and only if more follow. Empty ones if `empty`.
local function range_items(inner, empty)
  local found, sum = {}, ZERO
  while inner.at < inner.stop do
    local each, number = number_item(inner, a.range)
    if number == ZERO and #found > 0 then
      fail("a range is zero that is not the first (AQ-20, AQ-21, AQ0-6)")
    end
    local before = sum
    sum = sum + number
    if sum < before then
      fail("the sum of ranges is above 2^64-1 (AQ-R2)")
    end
    found[#found + 1] = each
  end
  if sum == ZERO and not (empty and #found == 0) then
    fail("there are no ranges (AQ-20, AQ-21, AQ0-6)")
  end
  return found
end

local function has(list, channel)
  for _, each in ipairs(list) do
    if each == channel then
      return true
    end
  end
  return false
end

-- What a frame may be attached to: each is created by who sends the frame (AQ-16, AQ0-24).
local function attachment_items(inner, seq, with_headers)
  local found, channels = {}, {}
  while inner.at < inner.stop do
    local at = inner.at
    local channel = varint(inner)
    if channel == ZERO or creator_of(channel, seq.dialect) ~= seq.server then
      fail("an attached channel is not of the sender of the frame (AQ-16, AQ0-24)")
    end
    if has(channels, channel) then
      fail("a channel is attached twice (AQ-R4, AQ0-24)")
    end
    channels[#channels + 1] = channel
    local each = channel_item(a.attachment, channel, at, inner.at - at, seq.dialect)
    if with_headers then
      append(each.inner, header_items(block(inner)))
    end
    found[#found + 1] = each
  end
  return found
end

-- The end of a MESSAGE: its payload may be long, and is shown as its bytes come.
local function payload_item(reader, frame)
  local at = reader.at
  local size = varint(reader)
  frame.payload = size:tonumber()
  return item(a.payload_length, at, reader.at - at, size)
end

local function check_once(number, seq, text)
  if bit(seq.route, 2) and number > ONE then
    fail(text .. " above 1 on a oneshot channel (AQ-R28)")
  end
end

local function check_number(number, channel)
  if bit(channel, 2) and number > ZERO then
    fail("a message number above 0 on a oneshot channel (AQ-R28)")
  end
end

local function read_version(reader)
  for k = 2, #MAGIC do
    if byte(reader) ~= MAGIC:byte(k) then
      fail("VERSION has other magic bytes (AQ-R5)")
    end
  end
  local size = varint(reader):tonumber()
  if size > 255 then
    fail("VERSION has more than 255 bytes of text (AQ-R5)")
  end
  local at = reader.at
  if take(reader, size) ~= VERSION then
    fail("VERSION names another version (AQ-R5)")
  end
  return { item(a.version, at, size, VERSION) }
end

local AQ = {
  [239] = { name = "VERSION", read = read_version },
  [1] = { name = "ACK_VERSION" },
  [2] = {
    name = "CONNECTION_HEADERS",
    read = function(reader)
      return header_items(block(reader))
    end,
  },
  [3] = {
    name = "ROUTE_TO",
    read = function(reader, seq, frame)
      local at = reader.at
      frame.route = varint(reader)
      return { channel_item(a.channel, frame.route, at, reader.at - at, seq.dialect) }
    end,
  },
  [4] = {
    name = "MESSAGE",
    by = "sender",
    read = function(reader, seq, frame)
      local num, number = number_item(reader, a.num)
      check_number(number, seq.route)
      local items = append({ num }, header_items(block(reader)))
      append(items, attachment_items(block(reader), seq, true))
      items[#items + 1] = payload_item(reader, frame)
      return items
    end,
  },
  [5] = {
    name = "SENT_UNRELIABLE",
    by = "sender",
    read = function(reader, seq)
      local count, number = number_item(reader, a.count)
      check_once(number, seq, "a count")
      return { count }
    end,
  },
  [6] = {
    name = "FINISH_SENDER",
    by = "sender",
    read = function(reader, seq)
      local count, number = number_item(reader, a.sent_reliable)
      check_once(number, seq, "a number of messages")
      return { count }
    end,
  },
  [7] = { name = "CANCEL_SENDER", by = "sender" },
  [8] = {
    name = "ACK_RELIABLE",
    by = "receiver",
    read = function(reader)
      local found = range_items(block(reader), false)
      if #found % 2 == 1 then
        fail("ACK_RELIABLE has an odd number of ranges (AQ-20)")
      end
      return found
    end,
  },
  [9] = {
    name = "ACK_NACK_UNRELIABLE",
    by = "receiver",
    read = function(reader, seq)
      local at = reader.at
      local channel = varint(reader)
      if channel ~= seq.route then
        fail("ACK_NACK_UNRELIABLE names another channel than ROUTE_TO (AQ-R14)")
      end
      local items = { channel_item(a.channel, channel, at, reader.at - at, seq.dialect) }
      return append(items, range_items(block(reader), false))
    end,
  },
  [10] = { name = "CLOSE_RECEIVER", by = "receiver" },
  [11] = { name = "FORGET_CHANNEL", by = "creator" },
}

-- AQ-9, AQ-24, AQ-R11: whether this frame may stand here.
local function check_place(kind, tag, seq)
  local prelude = tag == 239 or tag <= 3
  if prelude ~= (seq.route == nil) then
    fail(kind.name .. " may not stand " .. (prelude and "behind" or "before") .. " ROUTE_TO (AQ-9)")
  end
  if seq.carrier == "datagram" and tag ~= 239 and tag ~= 3 and tag ~= 4 then
    fail(kind.name .. " may not travel in a datagram (AQ-R11)")
  end
  if kind.by then
    local side = sender_of(seq.route, seq.dialect)
    if kind.by == "receiver" then
      side = not side
    elseif kind.by == "creator" then
      side = creator_of(seq.route, seq.dialect)
    end
    if side ~= seq.server then
      fail(kind.name .. " is for the " .. kind.by .. " of the channel to send (AQ-24)")
    end
  end
end

local function ranges(reader)
  return range_items(block(reader), true)
end

local function control_count(field, text)
  return function(reader, seq)
    local count, number = number_item(reader, field)
    check_once(number, seq, text)
    return { count }
  end
end

-- The control-stream draft.
local CONTROL = {
  [239] = { name = "Version", read = read_version },
  [1] = {
    name = "ConnectionControl",
    final = true,
    read = function(reader)
      return header_items(block(reader))
    end,
  },
  [2] = {
    name = "ChannelControl",
    read = function(reader, seq, frame)
      local at = reader.at
      frame.route = varint(reader)
      if creator_of(frame.route, seq.dialect) == seq.server then
        fail("ChannelControl for a channel that its own side created (AQ0-25)")
      end
      return { channel_item(a.channel, frame.route, at, reader.at - at, seq.dialect) }
    end,
  },
  [3] = {
    name = "Message",
    read = function(reader, seq, frame)
      local at = reader.at
      local channel = varint(reader)
      if sender_of(channel, seq.dialect) ~= seq.server then
        fail("Message on a channel of which its side is not the sender (AQ0-13)")
      end
      frame.channel = channel
      local items = { channel_item(a.channel, channel, at, reader.at - at, seq.dialect) }
      local num, number = number_item(reader, a.num)
      check_number(number, channel)
      items[2] = num
      append(items, attachment_items(block(reader), seq, false))
      items[#items + 1] = payload_item(reader, frame)
      return items
    end,
  },
  [4] = { name = "SentUnreliable", by = "sender", read = control_count(a.count, "a count") },
  [5] = { name = "AckReliable", by = "receiver", read = ranges },
  [6] = { name = "AckNackUnreliable", by = "receiver", read = ranges },
  [7] = {
    name = "FinishSender",
    by = "sender",
    final = true,
    read = control_count(a.sent_reliable, "a number of messages"),
  },
  [8] = { name = "CloseReceiver", by = "receiver", final = true, read = ranges },
  [9] = {
    name = "ClosedChannelLost",
    final = true,
    read = function(reader, seq)
      local at = reader.at
      local channel = varint(reader)
      if creator_of(channel, seq.dialect) ~= seq.server then
        fail("ClosedChannelLost for a channel of the other side (AQ0-R11)")
      end
      return { channel_item(a.channel, channel, at, reader.at - at, seq.dialect) }
    end,
  },
}

local function check_control_place(kind, tag, seq)
  local both_ways = seq.carrier == "opener" or seq.carrier == "answer"
  local alone = seq.last == nil or (seq.frames == 1 and seq.last == "Version")
  local good
  if tag == 239 then
    good = seq.last == nil
  elseif tag == 1 then
    good = both_ways and (seq.carrier == "answer") == seq.server and seq.frames == 1
      and seq.last == "Version" and seq.route == nil
  elseif tag == 2 then
    good = seq.carrier == "opener" and alone
  elseif tag == 3 then
    good = not both_ways
  elseif tag == 9 then
    good = seq.carrier == "uni" and alone
  else
    good = both_ways and seq.route ~= nil
      and (sender_of(seq.route, seq.dialect) == seq.server) == (kind.by == "sender")
  end
  if seq.final or not good then
    fail(kind.name .. " may not stand here")
  end
end

local function read_frame(reader, seq)
  local control = seq.dialect == "control-streams"
  local tag = byte(reader)
  local kind = (control and CONTROL or AQ)[tag]
  if not kind then
    fail(string.format("there is no frame with tag %d", tag))
  end
  if control then
    check_control_place(kind, tag, seq)
  else
    check_place(kind, tag, seq)
  end
  local frame = { kind = "frame", name = kind.name, tag = tag, final = kind.final }
  frame.items = kind.read and kind.read(reader, seq, frame) or {}
  return frame
end

-- Reads the next bytes of a sequence; what is wrong ends it. Gives parts: frames, pieces of
-- payloads, the beginning of a frame that goes on later, an error, and bytes after an error. Their
-- places count from the beginning of `seq.pending`, which came before.
local function feed(seq, data)
  local text, at, parts = seq.pending .. data, 0, {}
  seq.pending = ""
  local function part(kind, size, more)
    more = more or {}
    more.kind, more.at, more.size = kind, at, size
    parts[#parts + 1] = more
    at = at + size
  end
  while at < #text do
    local left = #text - at
    if seq.dead then
      part("undissected", left)
    elseif seq.skip > 0 then
      local size = math.min(left, seq.skip)
      seq.skip = seq.skip - size
      part("payload", size, { channel = seq.message })
    else
      local reader = reader_of(text, at, #text, false)
      local good, found = pcall(read_frame, reader, seq)
      if good then
        seq.route = found.route or seq.route
        seq.message = found.channel or seq.route
        found.channel = seq.message
        seq.frames, seq.last, seq.final = seq.frames + 1, found.name, found.final
        seq.skip = found.payload or 0
        part("frame", reader.at - at, found)
      elseif found == MORE and left <= HEAD_LIMIT then
        seq.pending = text:sub(at + 1)
        part("waiting", left)
      elseif found == MORE or type(found) == "table" then
        seq.dead = true
        part("error", left, { text = found.text or "a frame is too long for a dissector" })
      else
        error(found, 0)
      end
    end
  end
  return parts
end

-- What is wrong if a sequence ends here; nil if nothing is.
local function cut_short(seq)
  if not seq.dead and (seq.pending ~= "" or seq.skip > 0) then
    return "the sequence ends inside a frame (AQ-R7, AQ0-8)"
  end
end

local function sequence(server, dialect, carrier, route)
  return {
    pending = "", skip = 0, frames = 0, server = server, dialect = dialect, carrier = carrier,
    route = route,
  }
end

local function copy(of)
  local made = {}
  for name, value in pairs(of) do
    made[name] = value
  end
  return made
end

-- -------------------------------------------------------------------------- chunks

-- BP-1, BP-3, BP-16, and what a tag cannot say, whoever it is for. Places count from `at` of tvb.
local function read_chunk(tvb, at)
  local left = tvb:len() - at
  local text = tvb:range(at, math.min(left, 64)):raw()
  local reader = reader_of(text, 0, #text, false)
  local chunk = { total_size = 0 }
  local tag = byte(reader)
  if math.floor(tag / 32) == PARTIAL then
    local size = tag % 8 + 1
    if #text > 1 and text:byte(2) == 0 then
      fail("the total size of a Partial is zero or not in the fewest bytes (BP-16)")
    end
    local low, high = 0, 0
    local bytes = take(reader, size)
    for k = 1, size do
      high = (high * 256 + math.floor(low / 0x1000000)) % 0x100000000
      low = (low * 256 + bytes:byte(k)) % 0x100000000
    end
    chunk.total, chunk.total_size = UInt64(low, high), size + 1
    tag = byte(reader)
  end
  chunk.tag_at, chunk.type, chunk.flags = reader.at - 1, math.floor(tag / 32), tag % 32
  local function flag(which)
    return math.floor(chunk.flags / which) % 2 == 1
  end
  chunk.has = flag
  if chunk.type == PARTIAL then
    fail("a Partial follows a Partial (BP-R10)")
  elseif chunk.total and not (flag(PAYLOAD) or flag(END)) then
    fail("a Partial before a chunk without a payload (BP-R10)")
  elseif flag(ACK_END) and chunk.flags ~= ACK_END then
    fail("ack-end does not stand alone in its chunk (BP-13)")
  elseif chunk.type == DUPLEX and not flag(PAYLOAD) then
    fail("a Duplex without a payload (BP-8, BP-9)")
  elseif chunk.type == IN_STREAM and flag(PAYLOAD) then
    fail("a payload on In-Stream, which only receives (BP-9, BP-R6)")
  elseif chunk.type == IN_REQUEST and flag(PAYLOAD) and flag(END) then
    fail("a response with an end (BP-11)")
  end
  chunk.id_at = reader.at
  chunk.id = varu64(reader)
  chunk.id_size = reader.at - chunk.id_at
  if chunk.type == DUPLEX and chunk.id == ZERO then
    fail("a Duplex with identifier 0, which is the top level's (BP-R13)")
  end
  local function sized(name)
    local start = reader.at
    local size = varu64(reader)
    chunk[name .. "_at"], chunk[name .. "_size"], chunk[name] = start, reader.at - start, size
    return size
  end
  local size = 0
  if flag(PAYLOAD) then
    local payload = sized("payload")
    if chunk.total and payload > chunk.total then
      fail("a payload is above the total size that was announced (BP-16)")
    elseif chunk.total and flag(END) and payload < chunk.total then
      fail("an end inside a partial payload (BP-R10)")
    end
    size = payload:tonumber()
    if size > CHUNK_LIMIT then
      fail(string.format("a payload of %.0f bytes is too long for a dissector", size))
    end
  end
  chunk.data, chunk.data_size = reader.at, size
  local behind = reader.at + size
  if behind > left then
    if flag(CREDIT) or flag(END) then
      error(MORE, 0) -- how many is not known yet
    end
    return nil, behind - left
  end
  text = left > behind and tvb:range(at + behind, math.min(left - behind, 32)):raw() or ""
  reader = reader_of(text, 0, #text, false)
  -- Places are those in the chunk, and this reader begins behind its payload.
  local function rest(name)
    sized(name)
    chunk[name .. "_at"] = chunk[name .. "_at"] + behind
  end
  if flag(CREDIT) then
    rest("credit")
  end
  chunk.end_data_size = 0
  if flag(END) then
    rest("end")
    if chunk.total and not flag(PAYLOAD) and chunk["end"] > chunk.total then
      fail("an end payload is above the total size that was announced (BP-16)")
    end
    chunk.end_data_size = chunk["end"]:tonumber()
    if chunk.end_data_size > CHUNK_LIMIT then
      fail(string.format("an end payload of %.0f bytes is too long", chunk.end_data_size))
    end
  end
  chunk.end_data = behind + reader.at
  chunk.size = chunk.end_data + chunk.end_data_size
  if chunk.size > left then
    return nil, chunk.size - left
  end
  return chunk
end

-- A chunk; or nil and how many bytes are missing (nil: some); or nil, nil and what is wrong. A number
-- is exact: with too small a one Wireshark would give chunks again that it gave before.
local function chunk_at(tvb, at)
  local good, chunk, missing = pcall(read_chunk, tvb, at)
  if good then
    return chunk, missing
  elseif chunk == MORE then
    return nil, nil
  elseif type(chunk) == "table" then
    return nil, nil, chunk.text
  end
  error(chunk, 0)
end

-- --------------------------------------------------------------- connections and views

local connections, views = {}, {}

local function reset()
  connections, views = {}, {}
end

function bpmux.init()
  reset()
end

local function connection_of(pinfo)
  local source = tostring(pinfo.src) .. " " .. pinfo.src_port
  local target = tostring(pinfo.dst) .. " " .. pinfo.dst_port
  local streams = { tcp_stream() }
  local name = source < target and source .. target or target .. source
  if #streams > 0 then
    name = tostring(streams[#streams].value)
  end
  local found = connections[name]
  if not found then
    found = { ways = {} }
    connections[name] = found
  end
  for _, place in ipairs({ source, target }) do
    found.ways[place] = found.ways[place]
      or { place = place, sequences = {}, routes = {}, message = "", partial = {} }
  end
  return found, found.ways[source], found.ways[target]
end

local function learn(connection, way, chunk, data)
  -- The client opens the first stream, and it begins with VERSION (AQ-26).
  local size = math.min(#data, #MAGIC)
  connection.channels = size > 0 and data:sub(1, size) == MAGIC:sub(1, size)
  connection.client = way.place
  connection.dialect = chunk.type == DUPLEX and "control-streams" or "aqueduct"
end

local function is_top(chunk)
  return chunk.type == IN_SINK and chunk.id == ZERO
end

-- What must be known of the chunks before to show this one; the state goes on behind it.
local function view_of(connection, way, other, chunk, data)
  local view = { message = way.message }
  local key = (chunk.type == IN_SINK and "i" or "o") .. tostring(chunk.id)
  local writes = chunk.type == OUT_SINK or chunk.type == IN_SINK or chunk.type == DUPLEX
  if chunk.has(PAYLOAD) then
    local opens = chunk.type == OUT_SINK or chunk.type == DUPLEX
    if opens and connection.channels == nil then
      learn(connection, way, chunk, data)
    end
    local left = way.partial[key]
    if chunk.total then
      left = chunk.total:tonumber()
    end
    left = left and left - #data
    way.partial[key] = left and left > 0 and left or nil
    view.unfinished = way.partial[key] ~= nil
    if is_top(chunk) then
      way.message = view.unfinished and #way.message < HEAD_LIMIT and way.message .. data or ""
    elseif writes and connection.channels then
      local seq = way.sequences[key]
      if not seq then
        local server = connection.client ~= way.place
        local carrier, route = "uni", nil
        if chunk.type == DUPLEX then
          carrier = "opener"
        elseif chunk.type == IN_SINK then
          carrier, route = "answer", other.routes[tostring(chunk.id)]
        end
        seq = sequence(server, connection.dialect, carrier, route)
        way.sequences[key] = seq
      end
      view.sequence = copy(seq)
      feed(seq, data)
      way.routes[tostring(chunk.id)] = seq.route
    end
  end
  view.channels = connection.channels
  view.server = connection.client ~= way.place
  view.dialect = connection.dialect
  if chunk.has(END) and writes then
    local seq = way.sequences[key]
    view.cut = seq and chunk.end_data_size == 0 and cut_short(seq) or nil
    way.sequences[key] = nil
  end
  return view
end

-- -------------------------------------------------------------------------- the tree

local function add_items(tree, items, tvb, base)
  for _, each in ipairs(items) do
    local range = tvb:range(base + each.at, each.size)
    local added
    if each.value == nil then
      added = tree:add(each.field, range)
    else
      added = tree:add(each.field, range, each.value)
    end
    if each.text then
      added:set_text(each.text)
    end
    if each.inner then
      add_items(added, each.inner, tvb, base)
    end
  end
end

-- Shows the parts of a sequence; gives the names of its frames. `shift` bytes came earlier, and are
-- in `joined` with the others; the other bytes begin at `base` of tvb.
local function add_parts(tree, parts, seq, tvb, base, joined, shift)
  local names = {}
  for _, part in ipairs(parts) do
    local source, start = tvb, base - shift
    if part.at < shift then
      source, start = joined, 0
    end
    local range = source:range(start + part.at, part.size)
    if part.kind == "frame" then
      local shown = tree:add(a.frame, range)
      local text = part.name
      shown:add(a.type, range, part.name)
      shown:add(a.tag, source:range(start + part.at, 1), part.tag)
      if part.channel then
        text = text .. ", channel " .. channel_text(part.channel, seq.dialect)
        if not part.route and not (part.items[1] and part.items[1].field == a.channel) then
          shown:add(a.channel, range, part.channel):set_generated(true)
        end
      end
      if part.payload then
        text = text .. string.format(", payload of %.0f bytes", part.payload)
      end
      shown:set_text(text)
      add_items(shown, part.items, source, start)
      names[#names + 1] = part.channel and part.name .. " " .. tostring(part.channel) or part.name
    elseif part.kind == "payload" then
      local shown = tree:add(a.payload, range)
      if part.channel and #names == 0 then
        shown:add(a.channel, range, part.channel):set_generated(true)
        names[1] = "payload of channel " .. tostring(part.channel)
      end
    elseif part.kind == "waiting" then
      tree:add(a.waiting, range)
    elseif part.kind == "error" then
      local shown = tree:add(a.undissected, range)
      shown:add_proto_expert_info(aqueduct_malformed, "Not a frame sequence: " .. part.text)
      names[#names + 1] = "malformed"
    else
      tree:add(a.undissected, range)
    end
  end
  return names
end

local function aqueduct_tree(root, range, view, text)
  local tree = root:add(aqueduct, range)
  tree:append_text(", " .. text)
  tree:add(a.from, range, SIDES[view.server]):set_generated(true)
  tree:add(a.dialect, range, view.dialect or "aqueduct"):set_generated(true)
  return tree
end

local function tvb_of(text, name)
  return ByteArray.new((text:gsub(".", function(each)
    return string.format("%02x", each:byte())
  end))):tvb(name)
end

-- A whole message of the top level: a datagram, or how many streams the peer may open.
local function add_message(root, view, chunk, tvb, at)
  local start = at + chunk.data
  local range = tvb:range(start, chunk.data_size)
  local text, source, base = range:raw(), tvb, start
  if view.message ~= "" then
    text = view.message .. text
    source, base = tvb_of(text, "Message of the top level"), 0
  end
  local kind = text:byte(1)
  local all = source:range(base, #text)
  if kind == 0 and view.channels then
    local tree = aqueduct_tree(root, range, view, "datagram")
    tree:add(a.datagram, all, true)
    local seq = sequence(view.server, view.dialect, "datagram")
    local parts = feed(seq, text:sub(2))
    local names = add_parts(tree, parts, seq, source, base + 1, nil, 0)
    local wrong = cut_short(seq)
    if wrong or (seq.frames == 0 and view.dialect == "control-streams" and not seq.dead) then
      wrong = wrong or "a datagram without a frame (AQ0-8)"
      tree:add_proto_expert_info(aqueduct_malformed, "Not a frame sequence: " .. wrong)
    end
    return "datagram " .. table.concat(names, ", ")
  end
  if (kind == 1 or kind == 2) and view.channels ~= false then
    local reader = reader_of(text, 1, #text, true)
    local good, items = pcall(function()
      local found = {}
      for k = 1, kind do
        local place = reader.at
        local number = varu64(reader)
        found[k] = item(k == 1 and a.streams or a.bidi_streams, place, reader.at - place, number)
      end
      return found
    end)
    if good and reader.at == #text then
      local tree = aqueduct_tree(root, range, view, "streams allowed")
      add_items(tree, items, source, base)
      return "streams allowed"
    end
  end
  if view.channels then
    local tree = aqueduct_tree(root, range, view, "message")
    tree:add_proto_expert_info(aqueduct_malformed, "a message of the top level of no known kind")
    return "malformed"
  end
end

-- An end with a payload: a reset, a stop, or the close of the connection.
local function add_end(root, view, chunk, tvb, at)
  local range = tvb:range(at + chunk.end_data, chunk.end_data_size)
  local text = range:raw()
  local reader = reader_of(text, 0, #text, true)
  local good, code = pcall(varu64, reader)
  local top = is_top(chunk)
  local tree = aqueduct_tree(root, range, view, top and "close" or "end of a stream")
  if not good or not (top or reader.at == #text) then
    tree:add_proto_expert_info(aqueduct_malformed, "the end of a stream has no code")
    return "malformed"
  end
  if top then
    tree:add(a.close_code, tvb:range(at + chunk.end_data, reader.at), code)
    local reason = text:sub(reader.at + 1)
    if reason ~= "" then
      tree:add(a.close_reason, tvb:range(at + chunk.end_data + reader.at, #reason), reason)
    end
    return "close with code " .. tostring(code)
  end
  local sink = chunk.type == OUT_SINK or chunk.type == IN_SINK
  tree:add(sink and a.reset or a.stop, range, code)
  return (sink and "reset" or "stop") .. " with code " .. tostring(code)
end

local function add_chunk(root, chunk, tvb, at)
  local tree = root:add(bpmux, tvb:range(at, chunk.size))
  local text = TYPES[chunk.type] .. " " .. tostring(chunk.id)
  tree:append_text(", " .. text)
  if chunk.total then
    tree:add(b.total, tvb:range(at, chunk.total_size), chunk.total)
  end
  local tag = tvb:range(at + chunk.tag_at, 1)
  tree:add(b.type, tag)
  for _, field in ipairs({
    b.flags_payload, b.flags_credit, b.flags_ping, b.flags_end, b.flags_ack_end,
  }) do
    tree:add(field, tag)
  end
  local request = chunk.type == OUT_REQUEST or chunk.type == IN_REQUEST
  tree:add(request and b.request or b.stream, tvb:range(at + chunk.id_at, chunk.id_size), chunk.id)
  local function sized(name, length_field, data_field, place, size)
    tree:add(length_field, tvb:range(at + chunk[name .. "_at"], chunk[name .. "_size"]), chunk[name])
    if data_field and size > 0 then
      tree:add(data_field, tvb:range(at + place, size))
    end
  end
  if chunk.has(PAYLOAD) then
    sized("payload", b.payload_length, b.payload, chunk.data, chunk.data_size)
  end
  if chunk.has(CREDIT) then
    sized("credit", b.credit)
  end
  if chunk.has(END) then
    sized("end", b.end_length, b.end_payload, chunk.end_data, chunk.end_data_size)
  end
  return text
end

-- One chunk with what is in it; gives the text for the list of packets.
local function show(root, view, chunk, tvb, at)
  local texts = { add_chunk(root, chunk, tvb, at) }
  if view.sequence and chunk.data_size > 0 then
    local range = tvb:range(at + chunk.data, chunk.data_size)
    local seq = copy(view.sequence)
    local shift, joined = #seq.pending, nil
    if shift > 0 then
      joined = tvb_of(seq.pending .. range:raw(), "Frame in several chunks")
    end
    local parts = feed(seq, range:raw())
    local tree = aqueduct_tree(root, range, view, "stream " .. tostring(chunk.id))
    append(texts, add_parts(tree, parts, seq, tvb, at + chunk.data, joined, shift))
  elseif is_top(chunk) and chunk.data_size > 0 and not view.unfinished then
    texts[#texts + 1] = add_message(root, view, chunk, tvb, at)
  end
  if view.cut then
    local tree = aqueduct_tree(root, tvb:range(at, chunk.size), view, "end of a stream")
    tree:add_proto_expert_info(aqueduct_malformed, "Not a frame sequence: " .. view.cut)
  end
  if chunk.has(END) and chunk.end_data_size > 0 and view.channels and not chunk.total then
    texts[#texts + 1] = add_end(root, view, chunk, tvb, at)
  end
  return table.concat(texts, " "), view.channels and #texts > 1
end

local function undissected(root, tvb, at, info, text)
  local range = tvb:range(at)
  local tree = root:add(bpmux, range)
  tree:add(b.undissected, range)
  tree:add_proto_expert_info(info, text)
end

-- How many chunks of this packet have been shown: TLS and TCP may call several times for one.
local function following(pinfo)
  local number = tonumber(pinfo.private["bpmux.chunks"] or "0") + 1
  pinfo.private["bpmux.chunks"] = tostring(number)
  return number
end

function bpmux.dissector(tvb, pinfo, root)
  local connection, way, other = connection_of(pinfo)
  local size, at, texts, inside = tvb:len(), 0, {}, false
  if way.lost and pinfo.number > way.lost then
    undissected(root, tvb, 0, bpmux_lost, "Where chunks begin is not known since an earlier packet")
    return size
  end
  while at < size do
    local chunk, missing, wrong = chunk_at(tvb, at)
    if wrong then
      undissected(root, tvb, at, bpmux_malformed, "Not a chunk: " .. wrong)
      way.lost = math.min(way.lost or pinfo.number, pinfo.number)
      texts[#texts + 1] = "malformed"
      break
    elseif not chunk then
      pinfo.desegment_offset = at
      pinfo.desegment_len = missing or DESEGMENT_ONE_MORE_SEGMENT
      break
    end
    local place = pinfo.number .. "/" .. following(pinfo)
    local view = views[place]
    if not view then
      local data = ""
      if chunk.data_size > 0 then
        data = tvb:range(at + chunk.data, chunk.data_size):raw()
      end
      view = view_of(connection, way, other, chunk, data)
      views[place] = view
    end
    local text, deeper = show(root, view, chunk, tvb, at)
    texts[#texts + 1] = text
    inside = inside or deeper
    at = at + chunk.size
  end
  if #texts > 0 then
    pinfo.cols.protocol = inside and "Aqueduct" or "bpmux"
    pinfo.cols.info = table.concat(texts, "; ")
  end
  return size
end

-- Each side's first chunk is credit for the top level: In-Stream 0.
local function begins_like_bpmux(tvb, pinfo, root)
  if tvb:len() < 3 or tvb:range(0, 2):uint() ~= 0xa800 then
    return false
  end
  local chunk, _, wrong = chunk_at(tvb, 0)
  if wrong or (chunk and chunk.size < 3) then
    return false
  end
  pinfo.conversation = bpmux
  bpmux.dissector(tvb, pinfo, root)
  return true
end

bpmux:register_heuristic("tcp", begins_like_bpmux)
DissectorTable.get("tcp.port"):add_for_decode_as(bpmux)
DissectorTable.get("tls.alpn"):add("aqueduct-bpmux", bpmux)
