-- wrk -t1 -cN -dT -s load.lua URL: POST one of the bodies in the folder BODIES (0.body, 0.headers, ... COUNT of them),
-- chosen at random from SEED, and end with one line that bench/load.py reads.
local requests, tokens = {}, {}
local threads = {}

function setup(thread)
  table.insert(threads, thread)
end

local function read(path)
  local file = assert(io.open(path, "rb"))
  local content = file:read("*a")
  file:close()
  return content
end

function init(args)
  local folder, count = os.getenv("BODIES"), tonumber(os.getenv("COUNT"))
  sent_requests, sent_tokens = 0, 0  -- globals, so that done() can ask for them
  math.randomseed(tonumber(os.getenv("SEED")))
  for i = 0, count - 1 do
    local headers = { ["Host"] = wrk.headers["Host"] }
    for name, value in read(folder .. "/" .. i .. ".headers"):gmatch("([^\n:]+): ([^\n]*)") do
      headers[name] = value
    end
    tokens[i + 1] = tonumber(read(folder .. "/" .. i .. ".tokens"))
    requests[i + 1] = wrk.format("POST", nil, headers, read(folder .. "/" .. i .. ".body"))
  end
end

function request()
  local i = math.random(#requests)
  sent_requests, sent_tokens = sent_requests + 1, sent_tokens + tokens[i]
  return requests[i]
end

function done(summary, latency, _)
  local e = summary.errors
  local tokens_each = threads[1]:get("sent_tokens") / math.max(1, threads[1]:get("sent_requests"))
  io.write(string.format(
    'RESULT {"requests":%d,"us":%d,"p50_us":%d,"p99_us":%d,"tokens_each":%.6f,' ..
    '"connect":%d,"read":%d,"write":%d,"status":%d,"timeout":%d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99), tokens_each,
    e.connect, e.read, e.write, e.status, e.timeout))
end
