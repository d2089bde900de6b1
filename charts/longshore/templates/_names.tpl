{{- define "longshore.name" -}}
{{- if contains "longshore" .Release.Name }}{{ .Release.Name }}-operator{{ else }}{{ .Release.Name }}-longshore-operator{{ end -}}
{{- end }}

{{- define "longshore.selector" -}}
app.kubernetes.io/name: longshore-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "longshore.labels" -}}
{{ include "longshore.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: longshore
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "longshore.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end -}}
{{- end }}

{{- /* Not empty if the CRD exists and belongs to another release or to none. Helm would refuse to install over it. */ -}}
{{- define "longshore.foreignDefinition" -}}
{{- with lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "disaggdeployments.longshore.dev" }}
{{- $owner := .metadata.annotations | default dict }}
{{- if or (ne (get $owner "meta.helm.sh/release-name") $.Release.Name) (ne (get $owner "meta.helm.sh/release-namespace") $.Release.Namespace) }}true{{ end }}
{{- end }}
{{- end }}

{{- define "longshore.allow" -}}
{{- $names := list }}
{{- range $value, $name := dict "image" "image" "hostNetwork" "hostNetwork" "hostIPC" "hostIPC" "noNetworkPolicy" "networkPolicy" }}
{{- if index ($.Values.allow | default dict) $value }}{{ $names = append $names $name }}{{ end }}
{{- end }}
{{- join "," $names }}
{{- end }}

{{- define "longshore.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "longshore.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "longshore.rules" -}}
- apiGroups: [longshore.dev]
  resources: [disaggdeployments]
  verbs: [get, list, watch]
- apiGroups: [longshore.dev]
  resources: [disaggdeployments/status]
  verbs: [get, patch]
# Owner references of children with blockOwnerDeletion need this right.
- apiGroups: [longshore.dev]
  resources: [disaggdeployments/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [daemonsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps, services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
# Keys are created and never read.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [events]
  verbs: [create, get, list, update]
# Leases of other releases, which may serve the same deployments.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get]
{{- end }}

{{- define "longshore.injected" -}}
objectSelector: {matchExpressions: [{key: longshore.dev/inject, operator: Exists}]}
resourceRules:
- {apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}
{{- end }}

{{- define "longshore.injecting" -}}
namespaceSelector:
  matchLabels:
    longshore.dev/inject: enabled
    {{- if eq .Values.mode "namespaced" }}
    kubernetes.io/metadata.name: {{ .Release.Namespace }}
    {{- end }}
{{- end }}
