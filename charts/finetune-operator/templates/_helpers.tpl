{{- define "finetune.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "finetune.fullname" -}}
{{- $name := include "finetune.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "finetune.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "finetune.fullname" .) -}}
{{- end -}}

{{- /* Labels that a selector may hold: they never change. Called with (dict "root" $ "component" "operator"). */ -}}
{{- define "finetune.selector" -}}
app.kubernetes.io/name: {{ include "finetune.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- /* Labels of an object. `more` (optional) are labels of the user's for this object; ours cannot be replaced. */ -}}
{{- define "finetune.labels" -}}
{{- $own := include "finetune.selector" . | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- merge $own (.more | default dict) (.root.Values.commonLabels | default dict) | toYaml -}}
{{- end -}}

{{- /* The reference of an image. Called with (dict "root" $ "image" .Values.image.operator). */ -}}
{{- define "finetune.image" -}}
{{- $registry := .root.Values.global.imageRegistry | default .image.registry -}}
{{- with $registry }}{{ . }}/{{ end -}}
{{- .image.repository -}}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end -}}
{{- end -}}

{{- /*
The image of the MLflow server: its own or, without one, the trainer's. NB: not with the trainer's tag or digest, which may
be those for GPUs.
*/ -}}
{{- define "finetune.mlflowImage" -}}
{{- $image := .Values.mlflow.image -}}
{{- if not $image.repository -}}
{{- $trainer := pick .Values.image.trainer "registry" "repository" -}}
{{- $registry := $image.registry | default $trainer.registry -}}
{{- $image = merge (dict "registry" $registry "repository" $trainer.repository) $image -}}
{{- end -}}
{{- include "finetune.image" (dict "root" . "image" $image) -}}
{{- end -}}

{{- /* Names of pull secrets, as JSON, from lists of names and of objects with a name. */ -}}
{{- define "finetune.pullSecretNames" -}}
{{- $names := list -}}
{{- range . -}}
{{- if kindIs "string" . -}}
{{- $names = append $names . -}}
{{- else -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- end -}}
{{- $names | uniq | toJson -}}
{{- end -}}

{{- define "finetune.pullSecrets" -}}
{{- $all := concat (.Values.global.imagePullSecrets | default list) (.Values.imagePullSecrets | default list) -}}
{{- with include "finetune.pullSecretNames" $all | fromJsonArray }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "finetune.podSecurity" -}}
{{- if .Values.openshift -}}
{{- omit (.Values.podSecurityContext | default dict) "runAsUser" "runAsGroup" "fsGroup" | toYaml -}}
{{- else -}}
{{- toYaml .Values.podSecurityContext -}}
{{- end -}}
{{- end -}}

{{- /* What the operator gives to jobs that do not say otherwise: only what is set. */ -}}
{{- define "finetune.defaults" -}}
{{- $found := dict -}}
{{- range $name, $value := omit .Values.defaults "pods" "modelCache" "imagePullSecrets" -}}
{{- if $value -}}
{{- $_ := set $found $name $value -}}
{{- end -}}
{{- end -}}
{{- $pods := dict -}}
{{- range $role, $fields := .Values.defaults.pods -}}
{{- $kept := dict -}}
{{- range $name, $value := $fields -}}
{{- if $value -}}
{{- $_ := set $kept $name $value -}}
{{- end -}}
{{- end -}}
{{- if $kept -}}
{{- $_ := set $pods $role $kept -}}
{{- end -}}
{{- end -}}
{{- if $pods -}}
{{- $_ := set $found "pods" $pods -}}
{{- end -}}
{{- if .Values.defaults.modelCache.claimName -}}
{{- $_ := set $found "modelCache" .Values.defaults.modelCache -}}
{{- end -}}
{{- $secrets := list -}}
{{- $all := concat (.Values.global.imagePullSecrets | default list) (.Values.imagePullSecrets | default list) -}}
{{- $all = concat $all (.Values.defaults.imagePullSecrets | default list) -}}
{{- range include "finetune.pullSecretNames" $all | fromJsonArray -}}
{{- $secrets = append $secrets (dict "name" .) -}}
{{- end -}}
{{- if $secrets -}}
{{- $_ := set $found "imagePullSecrets" $secrets -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{- /* Variables of the pods that talk to servers outside the cluster: certificates and proxies. */ -}}
{{- define "finetune.outsideEnv" -}}
{{- if or .Values.caBundle.configMap .Values.caBundle.secret }}
{{- $file := printf "/etc/finetune-ca/%s" .Values.caBundle.key }}
{{- range list "SSL_CERT_FILE" "REQUESTS_CA_BUNDLE" "AWS_CA_BUNDLE" }}
- name: {{ . }}
  value: {{ $file }}
{{- end }}
{{- end }}
{{- with .Values.proxy.http }}
- name: HTTP_PROXY
  value: {{ . | quote }}
{{- end }}
{{- with .Values.proxy.https }}
- name: HTTPS_PROXY
  value: {{ . | quote }}
{{- end }}
{{- if or .Values.proxy.http .Values.proxy.https .Values.proxy.noProxy }}
# Kubernetes puts the address of the API server into this variable.
- name: NO_PROXY
  value: {{ concat (list "localhost" "127.0.0.1" "$(KUBERNETES_SERVICE_HOST)" ".svc" ".cluster.local") (.Values.proxy.noProxy | default list) | join "," | quote }}
{{- end }}
{{- end -}}

{{- define "finetune.caVolume" -}}
{{- if or .Values.caBundle.configMap .Values.caBundle.secret }}
- name: ca-bundle
  {{- if .Values.caBundle.configMap }}
  configMap:
    name: {{ .Values.caBundle.configMap }}
  {{- else }}
  secret:
    secretName: {{ .Values.caBundle.secret }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "finetune.caMount" -}}
{{- if or .Values.caBundle.configMap .Values.caBundle.secret }}
- name: ca-bundle
  mountPath: /etc/finetune-ca
  readOnly: true
{{- end }}
{{- end -}}

{{- /*
The release that a CRD belongs to, as namespace/name; empty when there is no such CRD, when it is this release's, or where
no cluster is asked (helm template, Argo CD). Called with (dict "root" $ "name" "finetunejobs.finetune.dev").
*/ -}}
{{- define "finetune.crdOwner" -}}
{{- $found := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" .name -}}
{{- if $found -}}
{{- $notes := $found.metadata.annotations | default dict -}}
{{- $owner := printf "%s/%s" (index $notes "meta.helm.sh/release-namespace" | default "") (index $notes "meta.helm.sh/release-name" | default "") -}}
{{- if ne $owner (printf "%s/%s" .root.Release.Namespace .root.Release.Name) -}}
{{- $owner -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /*
Whether a CRD is left out: another release has installed the same one and keeps it. Helm refuses to install what belongs to
another release, also after that one is uninstalled. A CRD that differs is not left out: Helm refuses the installation, or
updates the CRD with --take-ownership.
NB: a CRD without the annotation `keep` must not be left out: if it was in this release before, Helm would delete it.
*/ -}}
{{- define "finetune.crdIsThere" -}}
{{- if include "finetune.crdOwner" . -}}
{{- $notes := (lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" .name).metadata.annotations | default dict -}}
{{- $kept := eq (index $notes "helm.sh/resource-policy" | default "") "keep" -}}
{{- $same := eq (index $notes "finetune.dev/crd-digest" | default "") (include "finetune.crdDigests" . | fromYaml | dig .name "none") -}}
{{- if and $kept $same -}}
true
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "finetune.mlflowName" -}}
{{ include "finetune.fullname" . }}-mlflow
{{- end -}}

{{- define "finetune.mlflowUri" -}}
http://{{ include "finetune.mlflowName" . }}.{{ .Release.Namespace }}.svc:5000
{{- end -}}

{{- define "finetune.trackingUri" -}}
{{- if .Values.tracking.uri -}}
{{- .Values.tracking.uri -}}
{{- else if .Values.mlflow.enabled -}}
{{- include "finetune.mlflowUri" . -}}
{{- end -}}
{{- end -}}

{{- /* MLflow compares the Host header as a whole, port included: each name stands for itself and with any port. */ -}}
{{- define "finetune.mlflowHosts" -}}
{{- $service := include "finetune.mlflowName" . -}}
{{- $inNamespace := printf "%s.%s" $service .Release.Namespace -}}
{{- $names := list $service $inNamespace (printf "%s.svc" $inNamespace) (printf "%s.svc.cluster.local" $inNamespace) -}}
{{- $names = concat $names (list "localhost" "127.0.0.1") (.Values.mlflow.allowedHosts | default list) -}}
{{- $hosts := list -}}
{{- range $names -}}
{{- $hosts = append $hosts . -}}
{{- if not (contains ":" .) -}}
{{- $hosts = append $hosts (printf "%s:*" .) -}}
{{- end -}}
{{- end -}}
{{- join "," $hosts -}}
{{- end -}}

{{- /* Not empty if tenancy.tenants is set, also to an empty list. */ -}}
{{- define "finetune.hasTenancy" -}}
{{- if kindIs "slice" .Values.tenancy.tenants -}}
true
{{- end -}}
{{- end -}}

{{- /* Not empty if an alias of a tenant needs approvals. */ -}}
{{- define "finetune.hasApprovals" -}}
{{- range .Values.tenancy.tenants -}}
{{- if .approvals -}}
true
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A regular expression for names that fit one of a list of patterns, as a string of CEL. It ignores case, as Unity Catalog does. */ -}}
{{- define "finetune.patternRegex" -}}
{{- $alternatives := list -}}
{{- range . -}}
{{- $alternatives = append $alternatives (regexQuoteMeta . | replace "\\*" ".*") -}}
{{- end -}}
{{- printf "(?is)^(%s)$" (join "|" $alternatives) | toJson -}}
{{- end -}}

{{- /* Names and patterns of the namespaces of tenants, as JSON. Called with (dict "root" $); `pods` (optional): of tenants with this value. */ -}}
{{- define "finetune.tenantNamespaces" -}}
{{- $namespaces := list -}}
{{- range .root.Values.tenancy.tenants -}}
{{- if or (not $.pods) (eq $.pods (.pods | default "Scheduling")) -}}
{{- $namespaces = concat $namespaces .namespaces -}}
{{- end -}}
{{- end -}}
{{- $namespaces | uniq | toJson -}}
{{- end -}}

{{- /*
Not empty if the operator has its rights over children and Secrets in the namespaces of tenants alone. A RoleBinding needs the name of its
namespace, so with a pattern the rights are those of every namespace.
*/ -}}
{{- define "finetune.hasRightsByTenant" -}}
{{- if and (include "finetune.hasTenancy" .) (not .Values.watchNamespaces) -}}
{{- if not (contains "*" (include "finetune.tenantNamespaces" (dict "root" .))) -}}
true
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* What the pod templates of `defaults.pods` have of what the admission policy refuses: the platform team has chosen it. As JSON. */ -}}
{{- define "finetune.allowedPrivileges" -}}
{{- $paths := list -}}
{{- $capabilities := list -}}
{{- $classes := list -}}
{{- $flags := dict -}}
{{- range $role, $settings := .Values.defaults.pods -}}
{{- $spec := dig "template" "spec" dict $settings | default dict -}}
{{- range $spec.volumes -}}
{{- with .hostPath -}}
{{- $paths = append $paths .path -}}
{{- end -}}
{{- end -}}
{{- with $spec.priorityClassName -}}
{{- $classes = append $classes . -}}
{{- end -}}
{{- range $flag := list "hostPID" "hostIPC" "hostNetwork" -}}
{{- if index $spec $flag -}}
{{- $_ := set $flags $flag true -}}
{{- end -}}
{{- end -}}
{{- range concat ($spec.containers | default list) ($spec.initContainers | default list) -}}
{{- with .securityContext -}}
{{- if .privileged -}}
{{- $_ := set $flags "privileged" true -}}
{{- end -}}
{{- if .allowPrivilegeEscalation -}}
{{- $_ := set $flags "allowPrivilegeEscalation" true -}}
{{- end -}}
{{- with .capabilities -}}
{{- $capabilities = concat $capabilities (.add | default list) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- dict "hostPaths" ($paths | uniq) "capabilities" ($capabilities | uniq) "priorityClasses" ($classes | uniq) "flags" $flags | toJson -}}
{{- end -}}

{{- /*
The namespaces of tenants with pods: Scheduling that do not enforce a Pod Security level, as JSON. Empty where no cluster is asked (helm
template, Argo CD), and with watchNamespaces, where whoever installs the chart may not read namespaces.
*/ -}}
{{- define "finetune.openNamespaces" -}}
{{- $open := list -}}
{{- $patterns := include "finetune.tenantNamespaces" (dict "root" . "pods" "Scheduling") | fromJsonArray -}}
{{- if and $patterns (not .Values.watchNamespaces) -}}
{{- $unserved := include "finetune.unservedNamespaces" . | fromJsonArray -}}
{{- $regex := printf "^(%s)$" (join "|" $patterns | replace "*" ".*") -}}
{{- range (lookup "v1" "Namespace" "" "").items -}}
{{- $level := index (.metadata.labels | default dict) "pod-security.kubernetes.io/enforce" -}}
{{- if and (regexMatch $regex .metadata.name) (not (has .metadata.name $unserved)) (not (has $level (list "restricted" "baseline"))) -}}
{{- $open = append $open .metadata.name -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $open | toJson -}}
{{- end -}}

{{- /* Namespaces that are never served, whatever tenancy.tenants says, as JSON. */ -}}
{{- define "finetune.unservedNamespaces" -}}
{{- list "kube-system" "kube-public" "kube-node-lease" .Release.Namespace | toJson -}}
{{- end -}}

{{- /* How a validation of the admission policy refuses; called with what it refuses. */ -}}
{{- define "finetune.refusal" -}}
reason: Forbidden
message: {{ . }} is permitted only in namespaces of tenants with pods Any (tenancy.tenants of the chart)
{{- end -}}

{{- /* What the operator may do with FineTuneJobs, their children, ModelPromotions and FineTuneSchedules. */ -}}
{{- define "finetune.rules" -}}
{{ include "finetune.watchRules" . }}
{{ include "finetune.childRules" . }}
{{- end -}}

{{- /* What the operator needs wherever it watches: its own kinds, and the watches of the children. */ -}}
{{- define "finetune.watchRules" -}}
# Patched for finalizers: of jobs whose Databricks run is at work, and of promotions with onDelete: RemoveAlias. The trials of a job with
# spec.sweep are also suspended and resumed with it.
- apiGroups: [finetune.dev]
  resources: [finetunejobs, modelpromotions]
  verbs: [get, list, watch, patch]
- apiGroups: [finetune.dev]
  resources: [finetuneschedules]
  verbs: [list, watch]
- apiGroups: [finetune.dev]
  resources: [finetunejobs/status, modelpromotions/status, finetuneschedules/status]
  verbs: [patch]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [pods, services, configmaps]
  verbs: [list, watch]
{{- if .Values.networkPolicy.jobs }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [list, watch]
{{- end }}
# Created for people.
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}

{{- /* What the operator needs where its resources have children. */ -}}
{{- define "finetune.childRules" -}}
# FineTuneJobs of FineTuneSchedules, and the trials of a job with spec.sweep.
- apiGroups: [finetune.dev]
  resources: [finetunejobs]
  verbs: [create, delete]
# Needed for owner references that block deletion, with the admission plugin OwnerReferencesPermissionEnforcement.
- apiGroups: [finetune.dev]
  resources: [finetunejobs/finalizers, modelpromotions/finalizers, finetuneschedules/finalizers]
  verbs: [update]
# Of FineTuneJobs, and of the gates of ModelPromotions.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, create, patch, delete]
{{- if .Values.networkPolicy.jobs }}
# The pods of a job whose pods connect to each other accept connections only from each other.
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, patch, delete]
{{- end }}
# The uid of a job's namespace is a tag of its MLflow run: it tells the runs of this cluster from those of others.
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get]
# Pods are created as dry runs only, which tell before the preparation what would keep those of the training Job from being
# created. Without the right, they are not checked. A Job that the operator creates can run the same pods.
- apiGroups: [""]
  resources: [pods]
  verbs: [create]
# Whether a ServiceAccount may create Spark's executors, which is asked before a job starts. The answer gives away no more.
- apiGroups: [authorization.k8s.io]
  resources: [localsubjectaccessreviews]
  verbs: [create]
# Which of several jobs with the same preparation prepares. A Lease belongs to that job; it is deleted where another job takes
# its place. Names depend on the preparation, so none can be listed here.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, create, delete]
# Only Events say why the pods of a Job were rejected, whether an autoscaler adds a node, and which volume is missing.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
{{- if .Values.rbac.kueue }}
# Whether the queue of a job exists, why the job waits in it, and at which position.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads, localqueues]
  verbs: [list]
- apiGroups: [visibility.kueue.x-k8s.io]
  resources: [localqueues/pendingworkloads]
  verbs: [get]
{{- end }}
{{- if .Values.rbac.sparkApplications }}
# Preparations that the spark-operator runs. It may not see the deletion of a SparkApplication in time to delete the driver.
- apiGroups: [sparkoperator.k8s.io]
  resources: [sparkapplications]
  verbs: [get, list, create, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [delete]
{{- end }}
{{- if .Values.rbac.trackingSecrets }}
# Credentials named by spec.tracking.secretRef and by spec.serving.databricks.secretRef.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
{{- end }}
{{- end -}}
