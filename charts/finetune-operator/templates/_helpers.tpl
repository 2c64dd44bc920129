{{- define "finetune.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "finetune.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "finetune.name" .) -}}
{{- end -}}

{{- /* Labels that a selector may hold: they never change. Called with (dict "root" $ "component" "operator"). */ -}}
{{- define "finetune.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "finetune.labels" -}}
{{ include "finetune.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "finetune.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "finetune.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "finetune.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "finetune.mlflowName" -}}
{{ include "finetune.name" . }}-mlflow
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
{{- $names = concat $names (list "localhost" "127.0.0.1") .Values.mlflow.allowedHosts -}}
{{- $hosts := list -}}
{{- range $names -}}
{{- $hosts = append $hosts . -}}
{{- if not (contains ":" .) -}}
{{- $hosts = append $hosts (printf "%s:*" .) -}}
{{- end -}}
{{- end -}}
{{- join "," $hosts -}}
{{- end -}}

{{- /* What the operator may do with FineTuneJobs, their children, and ModelPromotions. */ -}}
{{- define "finetune.rules" -}}
- apiGroups: [finetune.dev]
  resources: [finetunejobs]
  verbs: [get, list, watch]
# Patched only for the finalizer that onDelete: RemoveAlias needs.
- apiGroups: [finetune.dev]
  resources: [modelpromotions]
  verbs: [get, list, watch, patch]
- apiGroups: [finetune.dev]
  resources: [finetunejobs/status, modelpromotions/status]
  verbs: [patch]
# Needed for owner references that block deletion, with the admission plugin OwnerReferencesPermissionEnforcement.
- apiGroups: [finetune.dev]
  resources: [finetunejobs/finalizers]
  verbs: [update]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, create, patch, delete]
# Pods are created as dry runs only, which tell before the preparation what would keep those of the training Job from being
# created. Without the right, they are not checked. A Job that the operator creates can run the same pods.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create]
# Created for people; listed because only Events say why the pods of a Job were rejected.
- apiGroups: [""]
  resources: [events]
  verbs: [create, list]
{{- if .Values.rbac.trackingSecrets }}
# Credentials named by spec.tracking.secretRef and by spec.serving.databricks.secretRef.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
{{- end }}
{{- end -}}
