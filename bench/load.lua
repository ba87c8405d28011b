-- wrk -t1 -cN -dT -s load.lua URL: POST one of the bodies in the folder BODIES (0.body, 0.headers, ... COUNT of them),
-- chosen at random from SEED, and end with one line that bench/load.py reads.
local requests = {}

local function read(path)
  local file = assert(io.open(path, "rb"))
  local content = file:read("*a")
  file:close()
  return content
end

function init(args)
  local folder, count = os.getenv("BODIES"), tonumber(os.getenv("COUNT"))
  math.randomseed(tonumber(os.getenv("SEED")))
  for i = 0, count - 1 do
    local headers = { ["Host"] = wrk.headers["Host"] }
    for name, value in read(folder .. "/" .. i .. ".headers"):gmatch("([^\n:]+): ([^\n]*)") do
      headers[name] = value
    end
    requests[i + 1] = wrk.format("POST", nil, headers, read(folder .. "/" .. i .. ".body"))
  end
end

function request()
  return requests[math.random(#requests)]
end

function done(summary, latency, _)
  local e = summary.errors
  io.write(string.format(
    'RESULT {"requests":%d,"us":%d,"p50_us":%d,"p99_us":%d,' ..
    '"connect":%d,"read":%d,"write":%d,"status":%d,"timeout":%d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    e.connect, e.read, e.write, e.status, e.timeout))
end
