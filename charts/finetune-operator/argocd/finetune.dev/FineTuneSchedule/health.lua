-- Health of a FineTuneSchedule. Argo CD provides the base and table libraries only: no string functions.

-- For each phase: the health. The condition Ready explains it.
local phases = {
  Pending = "Progressing",
  Scheduled = "Healthy",
  Suspended = "Suspended",
  Blocked = "Degraded",
}

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

local message = status.phase
for _, condition in ipairs(status.conditions or {}) do
  if condition.type == "Ready" then
    message = condition.message
  end
  -- A job that cannot be created for now.
  if known == "Healthy" and condition.type == "Reconciling" and condition.status == "True" then
    known = "Progressing"
  end
end

return health(known, message)
