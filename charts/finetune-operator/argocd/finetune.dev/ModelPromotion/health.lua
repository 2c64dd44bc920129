-- Health of a ModelPromotion. Argo CD provides the base and table libraries only: no string functions.

-- For each phase: the health, and the conditions that explain it. The first condition that is not True takes precedence.
-- Promoted always explains what delays a promotion.
local phases = {
  Pending = { "Progressing", { "Promoted", "SourceReady", "Accepted" } },
  AwaitingApproval = { "Suspended", { "Promoted" } },
  Soaking = { "Progressing", { "Promoted" } },
  Promoting = { "Progressing", { "Promoted", "Served" } },
  Promoted = { "Healthy", { "Promoted" } },
  Refused = { "Degraded", { "Promoted" } },
  Blocked = { "Degraded", { "Accepted", "Promoted", "Served" } },
  Suspended = { "Suspended", { "Suspended" } },
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

local conditions = {}
for _, condition in ipairs(status.conditions or {}) do
  conditions[condition.type] = condition
end

local function holds(kind)
  return conditions[kind] ~= nil and conditions[kind].status == "True"
end

local said = known[1]
-- A candidate that was refused degrades nothing while the alias is at a version that passed.
if status.phase == "Refused" and holds("Ready") then
  said = "Healthy"
end
-- While the registry does not answer, the rest of the status may be outdated.
if said ~= "Suspended" and holds("Reconciling") then
  said = "Progressing"
end
if said == "Healthy" and status.phase == "Refused" then
  return health(said, conditions.Ready.message)
end

local message = nil
for _, kind in ipairs(known[2]) do
  local condition = conditions[kind]
  if condition ~= nil and condition.status ~= "True" then
    message = condition.message
    break
  end
  if condition ~= nil and message == nil then
    message = condition.message
  end
end
message = message or status.phase

local registry = conditions.RegistryReady
if registry ~= nil and registry.status == "False" and registry.message ~= message then
  message = message .. " (the registry is not ready: " .. registry.message .. ")"
end

return health(said, message)
