-- Health of a FineTuneJob. Argo CD provides the base and table libraries only: no string functions.

-- For each phase: the health, and the conditions that explain it. Without progress: with it, every training step would
-- change the health and refresh the Application.
local phases = {
  Pending = { "Progressing", { "Trained", "Prepared", "Accepted" } },
  Queued = { "Progressing", { "Evaluated", "Trained", "Prepared" } },
  Preparing = { "Progressing", { "Prepared" } },
  Starting = { "Progressing", { "Trained" } },
  Training = { "Progressing", { "Trained" } },
  Evaluating = { "Progressing", { "Evaluated", "Trained" } },
  Registering = { "Progressing", { "Registered", "Trained" } },
  Suspended = { "Suspended", { "Suspended" } },
  Succeeded = { "Healthy", { "Registered", "Succeeded" } },
  Failed = { "Degraded", { "Failed" } },
}

-- What keeps a job from going on while it does not hold, the first of them first.
local obstacles = { "Accepted", "CodeResolved", "PodsAdmitted", "ModelsFound", "CheckpointFound", "PodsHealthy" }

local function health(status, message)
  return { status = status, message = message }
end

if obj.metadata.deletionTimestamp ~= nil then
  return health("Progressing", "being deleted")
end

local status = obj.status
if status == nil or status.observedGeneration ~= obj.metadata.generation then
  return health("Progressing", "waiting for the operator to reconcile generation " .. tostring(obj.metadata.generation))
end
if status.phase == nil then
  return health("Progressing", "waiting for the operator to set a phase")
end

local known = phases[status.phase]
if known == nil then
  return health("Unknown", "phase " .. status.phase .. " is unknown to this health script: use the script of your operator's version")
end

local conditions = {}
for _, condition in ipairs(status.conditions or {}) do
  conditions[condition.type] = condition
end

local message = status.phase
for _, kind in ipairs(known[2]) do
  if conditions[kind] ~= nil then
    message = conditions[kind].message
    break
  end
end

-- What keeps a job from going on explains more than the step that it is at.
if known[1] == "Progressing" then
  for _, kind in ipairs(obstacles) do
    if conditions[kind] ~= nil and conditions[kind].status == "False" then
      message = conditions[kind].message
      break
    end
  end
end

-- A job that waits for a change of its spec has not failed, and does not go on either.
if conditions.Stalled ~= nil and conditions.Stalled.status == "True" then
  return health("Degraded", message)
end

return health(known[1], message)
